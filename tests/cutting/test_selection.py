"""Token selection as functions: the formulas, their traps, and both ways to call them."""

import warnings

import pytest
import torch

import tokensieve
from tests.support.reference import anchor_choice, attention_matrix
from tests.support.rounding import assert_near
from tokensieve import UserError
from tokensieve.cutting import selection
from tokensieve.errors import PlanWarning
from tokensieve.methods.anchor import importance
from tokensieve.models.registry import open_tower
from tokensieve.scoring import Attention

K, M, ALPHA = 3, 6, 0.5


@pytest.fixture(scope="module")
def clip(tiny_clip):
    """In float64: its blocks make a rounding error of their input a thousand times as large, so in float32 it would be open
    which patches they choose, and formulas would agree to three digits only."""
    return tiny_clip.make()[0].double()


@pytest.fixture(scope="module")
def images():
    return torch.randn(4, 3, 48, 32, generator=torch.Generator().manual_seed(3)).double()


@pytest.fixture(scope="module")
def tokens(clip, images):
    with torch.no_grad():
        return clip.visual._embeds(images)  # (4, 25, 32)


@pytest.fixture(scope="module")
def block(clip):
    return clip.visual.transformer.resblocks[0]


@pytest.mark.parametrize("normalize", ["minmax", "none"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_selection_is_the_formula(clip, tokens, block, alpha, normalize):
    with torch.no_grad():
        kept = tokensieve.select_tokens_with_scoring(tokens, K, M, alpha, attention=block, normalize=normalize)
        anchors = tokensieve.select_anchor_tokens(tokens, K, attention=block)
        matrix = attention_matrix(block, tokens)
        for b in range(len(tokens)):
            wanted, wanted_anchors, _ = anchor_choice(matrix[b], tokens[b, 1:], K, M, alpha, normalize)
            assert kept[b].tolist() == wanted
            assert anchors[b].tolist() == wanted_anchors


def test_scores_are_the_formula(tokens, block):
    with torch.no_grad():
        anchors = tokensieve.select_anchor_tokens(tokens, K, attention=block)
        importance = tokensieve.compute_importance_scores(tokens, anchors, attention=block)
        diversity = tokensieve.compute_diversity_scores(tokens, anchors, attention=block)
        matrix = attention_matrix(block, tokens)
        for b in range(len(tokens)):
            rows, others = 1 + torch.arange(24), 1 + anchors[b]
            assert_near(importance[b].float(), torch.stack([matrix[b, i, others].mean() for i in rows]), steps=1000)
            cosines = [[torch.cosine_similarity(tokens[b, i], tokens[b, j], dim=0) for j in others] for i in rows]
            assert_near(diversity[b].float(), torch.stack([1 - torch.stack(row).max() for row in cosines]))


def test_importance_is_not_constant_and_alpha_changes_the_choice(tokens, block):
    with torch.no_grad():
        anchors = tokensieve.select_anchor_tokens(tokens, K, attention=block)
        spread = tokensieve.compute_importance_scores(tokens, anchors, attention=block).std(dim=1)
        assert (spread > 1e-4).all()
        choices = [tokensieve.select_tokens_with_scoring(tokens, K, M, a, attention=block) for a in (0.0, 0.5, 1.0)]
    assert not torch.equal(choices[0], choices[2])
    assert not torch.equal(choices[0], choices[1]), "alpha=0.5 must not be diversity only"
    assert not torch.equal(choices[1], choices[2]), "alpha=0.5 must not be importance only"


def test_attention_is_the_models_not_a_dot_product(tokens, block):
    with torch.no_grad():
        ours = tokensieve.select_anchor_tokens(tokens, 5, attention=block)
        raw = (tokens[:, :1] @ tokens[:, 1:].transpose(1, 2))[:, 0].topk(5).indices.sort().values
        cosine = torch.cosine_similarity(tokens[:, :1], tokens[:, 1:], dim=-1).topk(5).indices.sort().values
    assert not torch.equal(ours, raw) and not torch.equal(ours, cosine)


def test_zero_fill_keeps_the_length(clip, tokens, block):
    with torch.no_grad():
        attention = open_tower(clip).blocks[0].attention_at(tokens)
        out = tokensieve.apply_token_selection(tokens, k=K, m=M, alpha=ALPHA, attention=attention)
        kept = tokensieve.select_tokens_with_scoring(tokens, K, M, ALPHA, attention=block)
    assert out.shape == tokens.shape and torch.equal(out[:, 0], tokens[:, 0])
    for b in range(len(tokens)):
        for i in range(24):
            assert torch.equal(out[b, 1 + i], tokens[b, 1 + i] if i in kept[b] else torch.zeros(32).double())


def test_pooled_features_are_returned_as_they_are():
    pooled = torch.randn(4, 16)
    assert tokensieve.apply_token_selection(pooled, k=10, m=50, alpha=0.5) is pooled


def test_defaults_above_the_number_of_patches_keep_everything_and_compute_nothing(tokens, block):
    """k=10 and m=50 exceed the 24 patches here, as they exceed the 49 of ViT-B-32."""
    features = {name: tokens.clone() for name in ("own", "authors")}
    sizes = []
    with torch.no_grad(), _Watch(sizes):
        with pytest.warns(PlanWarning, match=r"k\+m=60 is not below the 24 patches: everything is kept"):
            assert tokensieve.apply_token_selection(features["own"]) is features["own"]
        with pytest.warns(PlanWarning, match="everything is kept"):
            everything = tokensieve.select_tokens_with_scoring(tokens, attention=block)
    assert torch.equal(everything, torch.arange(24).expand(4, -1))
    assert max(sizes) <= 4 * 24
    anchors = torch.tensor([[1, 2]] * 4)
    with pytest.warns(PlanWarning, match="everything is kept"):
        filled = tokensieve.select_tokens_with_scoring(features["authors"], anchors, torch.rand(4, 25), torch.rand(4, 25))
    assert filled is features["authors"]


@pytest.mark.parametrize("bad", [{"k": 0}, {"k": -1}, {"m": -1}, {"alpha": -0.1}, {"alpha": 1.1}, {"normalize": "softmax"}])
def test_bad_values_are_errors(tokens, bad):
    with pytest.raises(UserError):
        tokensieve.apply_token_selection(tokens, **bad)


def by_identity(tokens, k, m, alpha):
    """Kept patches, anchors, and scores of one image (1+N, D), by W_Q = W_K = identity and one head, one entry at a time."""
    logits = [[sum(a * b for a, b in zip(x, y, strict=True)) / len(x) ** 0.5 for y in tokens] for x in tokens.tolist()]
    matrix = torch.tensor(logits, dtype=torch.float64).softmax(-1)
    return anchor_choice(matrix, tokens[1:], k, m, alpha)


@pytest.fixture(scope="module")
def small_tokens():
    """In float64, (3, 1+12, 5). Short, so that the attention is not all on the token itself."""
    return torch.randn(3, 13, 5, generator=torch.Generator().manual_seed(5)).double() * 0.7


def test_tokens_alone_are_selected_by_the_identity(small_tokens):
    """apply_token_selection(tokens, k, m, alpha), as the documents call it."""
    out = tokensieve.apply_token_selection(small_tokens, 2, 4, 0.3, True)
    for b, image in enumerate(small_tokens):
        kept, _, _ = by_identity(image, 2, 4, 0.3)
        assert [i - 1 for i in range(1, 13) if (out[b, i] != 0).any()] == kept
        assert torch.equal(out[b, 0], image[0]) and all(torch.equal(out[b, 1 + i], image[1 + i]) for i in kept)
    assert tokensieve.apply_token_selection(small_tokens, 2, 4, 0.3, False) is small_tokens
    assert tokensieve.apply_token_selection(small_tokens, enabled=False) is small_tokens


def test_the_identity_is_said_once(small_tokens):
    selection._warn_of_identity.cache_clear()
    with pytest.warns(PlanWarning, match=r"identity.*21 of the 60 .* 18 .*model= and images=.*return_attention=True") as caught:
        for _ in range(3):
            tokensieve.apply_token_selection(small_tokens, 2, 4)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_authors_form_counts_cls_as_0_and_ours_counts_patches(small_tokens):
    """The same choices in both forms, one apart; scores are of the whole sequence there, of the patches here."""
    heads = small_tokens[:, None]
    attention = Attention(heads, heads, prefix=1, scale=5**-0.5)
    theirs, ours = (tokensieve.select_anchor_tokens(small_tokens, 3, **form) for form in ({}, {"attention": attention}))
    assert torch.equal(theirs, ours + 1) and theirs.min() >= 1
    for function in (tokensieve.compute_importance_scores, tokensieve.compute_diversity_scores):
        whole, patches = function(small_tokens, theirs), function(small_tokens, ours, attention=attention)
        assert whole.shape == (3, 13) and patches.shape == (3, 12)
        torch.testing.assert_close(whole[:, 1:], patches)
    for b, image in enumerate(small_tokens):
        _, anchors, _ = by_identity(image, 3, 2, 0.5)
        assert theirs[b].tolist() == [1 + i for i in anchors]


@pytest.mark.parametrize("normalize", ["minmax", "none"])
def test_authors_functions_together_are_apply_token_selection(small_tokens, normalize):
    anchors = tokensieve.select_anchor_tokens(small_tokens, 2)
    importance = tokensieve.compute_importance_scores(small_tokens, anchors)
    diversity = tokensieve.compute_diversity_scores(small_tokens, anchors)
    positional = tokensieve.select_tokens_with_scoring(
        small_tokens, anchors, importance, diversity, 4, 0.3, normalize=normalize
    )
    named = tokensieve.select_tokens_with_scoring(
        small_tokens, anchors=anchors, importance=importance, diversity=diversity, m=4, alpha=0.3, normalize=normalize
    )
    whole = tokensieve.apply_token_selection(small_tokens, 2, 4, 0.3, normalize=normalize)
    assert torch.equal(positional, whole) and torch.equal(named, whole)
    assert torch.equal((whole[:, 1:] != 0).any(-1).sum(1), torch.tensor([6, 6, 6]))


@pytest.mark.parametrize(
    ("anchors", "attention", "message"),
    [
        ([[0, 3]], None, "from 0 to 3: the patches are 1 to 12 here; without attention= they count CLS as 0"),
        ([[1, 13]], None, "from 1 to 13: the patches are 1 to 12"),
        ([[0, 12]], True, "from 0 to 12: the patches are 0 to 11 here; with attention= they count patches"),
        ([[1], [2]], None, r"\(B, k\) with B = 1 and k >= 1, not \(2, 1\)"),
    ],
)
def test_anchors_of_the_other_convention_are_errors(small_tokens, anchors, attention, message):
    tokens = small_tokens[:1]
    heads = tokens[:, None]
    given = Attention(heads, heads, prefix=1, scale=1.0) if attention else None
    for function in (tokensieve.compute_importance_scores, tokensieve.compute_diversity_scores):
        with pytest.raises(UserError, match=message):
            function(tokens, torch.tensor(anchors), attention=given)


def test_scores_of_patches_alone_are_an_error_in_the_authors_form(small_tokens):
    anchors = torch.tensor([[1, 2]] * 3)
    with pytest.raises(UserError, match=r"diversity has one score for each token, CLS included: \(3, 13\), not \(3, 12\)"):
        tokensieve.select_tokens_with_scoring(small_tokens, anchors, torch.rand(3, 13), torch.rand(3, 12))
    with pytest.raises(UserError, match=r"or \(tokens, anchors, importance, diversity, m, alpha\)"):
        tokensieve.select_tokens_with_scoring(small_tokens, 2, 4)


@pytest.fixture(scope="module")
def output(clip, images):
    """What leaves the last block, CLS first, (4, 25, 32), and its attention."""
    with torch.no_grad():
        _, patches, attention = tokensieve.get_image_features_with_tokens(clip, images, return_attention=True)
        x = clip.visual.transformer(clip.visual._embeds(images))
    assert torch.equal(x[:, 1:], patches)
    return x, attention


def test_the_models_attention_at_the_output_chooses_what_the_flags_choose(clip, images, output):
    x, attention = output
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanWarning)
            with tokensieve.apply(clip, selection.selection_plan(K, M)) as handle:
                clip.encode_image(images)
        by_attention = tokensieve.apply_token_selection(x, K, M, attention=attention)
        by_model = tokensieve.apply_token_selection(x, K, M, model=clip, images=images)
        alone = tokensieve.apply_token_selection(x, K, M)
    for b in range(4):
        assert (by_attention[b, 1:] != 0).any(-1).nonzero()[:, 0].tolist() == handle.kept[b].tolist()
    assert torch.equal(by_attention, by_model) and not torch.equal(alone, by_model)


def test_attention_of_another_width_or_block_is_an_error(clip, images, output):
    x, attention = output
    last = clip.visual.transformer.resblocks[-1]
    for module in (last, last.attn):
        with pytest.raises(UserError, match=r"does not say whether .* go into this module or come out of it; pass model="):
            tokensieve.apply_token_selection(x, K, M, attention=module)
        with pytest.raises(UserError, match="attention= has width 32, the tokens 16: they do not go into this block"):
            tokensieve.select_anchor_tokens(x[..., :16], 2, attention=module)
    with pytest.raises(UserError, match="of 4 images with 24 patches, the tokens are of 4 images with 23"):
        tokensieve.apply_token_selection(x[:, :-1], K, M, attention=attention)
    with pytest.raises(UserError, match="of 4 images with 24 patches, the tokens are of 2 images with 24"):
        tokensieve.apply_token_selection(x[:2], K, M, attention=attention)
    for given in ({"model": clip}, {"images": images}, {"model": clip, "images": images, "attention": attention}):
        with pytest.raises(UserError, match="takes model= and images= together, or attention=, or none of them"):
            tokensieve.apply_token_selection(x, K, M, **given)
    with pytest.raises(UserError, match="pass a block"):
        tokensieve.select_anchor_tokens(x, attention=torch.nn.Linear(2, 2))


def test_a_bare_attention_module_sees_the_tokens_as_they_are(tokens, block):
    with torch.no_grad():
        ours = tokensieve.select_anchor_tokens(block.ln_1(tokens), 5, attention=block.attn)
        assert torch.equal(ours, tokensieve.select_anchor_tokens(tokens, 5, attention=block))


def test_the_whole_matrix_is_never_stored():
    """N x k entries of a long sequence without a tensor of N x N numbers."""
    n = 700
    q, k = torch.randn(2, 1, 2, n + 1, 4)
    sizes = []
    watch = _Watch(sizes)
    with watch:
        importance(Attention(q, k, 1, 0.5), torch.arange(10)[None])
    assert max(sizes) < n * n


class _Watch(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, torch.Tensor):
                self.sizes.append(part.numel())
        return out


def test_the_opened_block_runs_its_attention_once(clip, images):
    """No second attention to get the scores: one fused kernel in the opened block, and nothing of N x N beside it."""
    calls = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "attention" in str(func):
                calls.append(str(func))
            return func(*args, **(kwargs or {}))

    block = clip.visual.transformer.resblocks[1]
    with torch.no_grad(), tokensieve.apply(clip, "anchor@2(k=3,m=6)"):
        x = clip.visual.transformer.resblocks[0](clip.visual._embeds(images))
        with Count():
            block(x)
    assert calls == ["aten._scaled_dot_product_flash_attention_for_cpu.default"]


def test_functions_and_plan_choose_alike(clip, images):
    """Attention from the block's input, cosines from its output: what anchor@L does, by hand."""
    block = open_tower(clip).blocks[1]
    with torch.no_grad():
        with tokensieve.apply(clip, f"anchor@2(k={K},m={M})") as handle:
            clip.encode_image(images)
        x = clip.visual.transformer.resblocks[0](clip.visual._embeds(images))
        kept = tokensieve.select_tokens_with_scoring(block.module(x), K, M, attention=block.attention_at(x))
    assert torch.equal(handle.kept, kept)


def test_selection_at_the_output_leaves_the_cls_feature(clip, images):
    with torch.no_grad(), warnings.catch_warnings():
        stock = clip.encode_image(images)
        with tokensieve.apply(clip, f"anchor@out(k={K},m={M},rest=zero)") as handle:
            features = clip.encode_image(images)
            x = clip.visual.transformer(clip.visual._embeds(images))
    assert_near(features, stock, steps=1e6)
    assert x.shape[1] == 25
    assert torch.equal((x[:, 1:] != 0).any(-1).sum(1), torch.tensor([K + M] * 4))
    for b in range(4):
        assert (x[b, 1:] != 0).any(-1).nonzero()[:, 0].tolist() == handle.kept[b].tolist()
