"""S1 and S2: the formulas, their traps, and the names users know."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from open_clip.transformer import VisionTransformer

import tokensieve
from tests.support.reference import anchor_choice, attention_matrix, pruned_features
from tests.support.rounding import assert_near
from tokensieve import UserError
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
        diversity = tokensieve.compute_diversity_scores(tokens, anchors)
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


def test_zero_fill_keeps_the_length(tokens, block):
    with torch.no_grad():
        out = tokensieve.apply_token_selection(tokens, k=K, m=M, alpha=ALPHA, attention=block)
        kept = tokensieve.select_tokens_with_scoring(tokens, K, M, ALPHA, attention=block)
    assert out.shape == tokens.shape and torch.equal(out[:, 0], tokens[:, 0])
    for b in range(len(tokens)):
        for i in range(24):
            assert torch.equal(out[b, 1 + i], tokens[b, 1 + i] if i in kept[b] else torch.zeros(32).double())


def test_pooled_features_are_returned_as_they_are():
    pooled = torch.randn(4, 16)
    assert tokensieve.apply_token_selection(pooled, k=10, m=50, alpha=0.5) is pooled


def test_defaults_above_the_number_of_patches_keep_everything_and_say_so(tokens, block):
    with torch.no_grad(), pytest.warns(PlanWarning, match="everything is kept"):
        assert torch.equal(tokensieve.apply_token_selection(tokens, attention=block), tokens)


@pytest.mark.parametrize("bad", [{"k": 0}, {"k": -1}, {"m": -1}, {"alpha": -0.1}, {"alpha": 1.1}, {"normalize": "softmax"}])
def test_bad_values_are_errors(tokens, block, bad):
    with pytest.raises(UserError):
        tokensieve.apply_token_selection(tokens, attention=block, **bad)


def test_missing_attention_is_an_error_not_another_method(tokens):
    with pytest.raises(UserError, match="own attention"):
        tokensieve.apply_token_selection(tokens)
    with pytest.raises(UserError, match="pass a block"):
        tokensieve.select_anchor_tokens(tokens, attention=torch.nn.Linear(2, 2))


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


@pytest.mark.parametrize("layer", [1, 2, 4])
def test_pruning_inside_the_tower_is_the_formula(clip, images, layer):
    with torch.no_grad():
        with tokensieve.apply_pruning_to_model(clip, k_anchors=K, top_m=M, alpha=ALPHA, prune_layer=layer) as handle:
            features = clip.encode_image(images)
        wanted, kept = pruned_features(clip.visual, images, layer, lambda a, x: anchor_choice(a, x, K, M, ALPHA)[0])
    assert handle.kept.tolist() == kept
    assert_near(features, wanted, steps=1e6)
    assert features.shape == (4, 16)
    assert [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger] == [(str(layer), 24, K + M)]


def test_pruning_cuts_at_half_the_depth_by_default_and_later_blocks_run_on_fewer(clip, images):
    lengths = []
    hooks = [
        b.ln_2.register_forward_hook(lambda m, a, y: lengths.append(y.shape[1])) for b in clip.visual.transformer.resblocks
    ]
    with torch.no_grad(), tokensieve.apply_pruning_to_model(clip, K, M):
        clip.encode_image(images)
    for hook in hooks:
        hook.remove()
    assert lengths == [25, 25, 1 + K + M, 1 + K + M]


def test_functions_and_plan_choose_alike(clip, images):
    """Attention from the block's input, cosines from its output: what anchor@L does, by hand."""
    block = open_tower(clip).blocks[1]
    with torch.no_grad():
        with tokensieve.apply(clip, f"anchor@2(k={K},m={M})") as handle:
            clip.encode_image(images)
        x = clip.visual.transformer.resblocks[0](clip.visual._embeds(images))
        kept = tokensieve.select_tokens_with_scoring(block.module(x), K, M, attention=block.attention_at(x))
    assert torch.equal(handle.kept, kept)


def test_pruned_vision_encoder_can_be_copied_and_pickled(images):
    tower = VisionTransformer((48, 32), 8, 32, 4, 4, 2.0, pool_type="avg").double().eval()
    encoder = tokensieve.PrunedVisionEncoder(tower, K, M, rest="merge")
    with torch.no_grad():
        for copied in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
            torch.testing.assert_close(copied(images), encoder(images), atol=0, rtol=0)


def test_every_image_gets_its_own_choice(clip, images):
    with torch.no_grad(), tokensieve.apply_pruning_to_model(clip, K, M) as handle:
        clip.encode_image(images)
        together = handle.kept
        alone = torch.cat([clip.encode_image(images[b : b + 1]) is not None and handle.kept for b in range(4)])
    assert torch.equal(together, alone)
    assert len({tuple(row) for row in together.tolist()}) > 1


def test_pruned_vision_encoder_wraps_and_leaves_the_tower_alone(clip, images):
    encoder = tokensieve.PrunedVisionEncoder(clip, k_anchors=K, top_m=M, alpha=ALPHA)
    with torch.no_grad():
        stock = clip.encode_image(images)
        pruned = encoder(images)
        assert torch.equal(stock, clip.encode_image(images)), "encode_image left patched"
        with tokensieve.apply_pruning_to_model(clip, K, M, ALPHA):
            assert torch.equal(pruned, clip.encode_image(images))
    assert pruned.shape == stock.shape and not torch.equal(pruned, stock)
    assert encoder.ledger[0].tokens_out == K + M
    names = [p.default for p in inspect.signature(tokensieve.PrunedVisionEncoder.__init__).parameters.values()]
    assert names[2:5] == [10, 50, 0.5]


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
