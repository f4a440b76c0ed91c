"""Token fusion against its formula, written slowly, one image and one patch at a time."""

import math

import pytest
import torch

import tokensieve
from tests.support import hf_models
from tests.support.reference import anchor_choice, attention_branch, attention_matrix, mlp_branch
from tests.support.rounding import assert_near
from tokensieve import UserError
from tokensieve.errors import Uncuttable
from tokensieve.evaluation import token_fusion
from tokensieve.evaluation.token_fusion import fused_feature
from tokensieve.models.features import encode_image, get_image_features_with_tokens

K, M = 3, 4


def images():
    return torch.randn(3, 3, 48, 32, generator=torch.Generator().manual_seed(1))


def slow(visual, pixels, layer, cut_here):
    """CLS feature, kept and projected patches and their scores, of each image; layer: after which block anchor chooses.

    cut_here: the others go; else they stay, and only the selected ones count. An anchor has the score 1.
    """
    x = visual._embeds(pixels)
    choices = []
    for number, block in enumerate(visual.transformer.resblocks, start=1):
        arrived = x
        x = mlp_branch(block, attention_branch(block, x))
        if number == layer:
            matrix = attention_matrix(block, arrived)
            choices = [anchor_choice(matrix[b], x[b, 1:], K, M, alpha=0.5) for b in range(len(x))]
            if cut_here:
                x = torch.stack([x[b, [0] + [1 + i for i in kept]] for b, (kept, _, _) in enumerate(choices)])
    rows = []
    for b, (kept, anchors, scores) in enumerate(choices):
        places = range(1, 1 + len(kept)) if cut_here else [1 + i for i in kept]
        patches = [visual.ln_post(x[b, place]) @ visual.proj for place in places]
        rows.append((visual.ln_post(x[b, 0]) @ visual.proj, patches, [1.0 if i in anchors else scores[i] for i in kept]))
    return rows


def by_formula(rows, fusion, weight, temperature):
    out = []
    for cls, patches, scores in rows:
        if fusion == "mean":
            out.append(sum(patches) / len(patches))
            continue
        powers = [math.exp(score / temperature) for score in scores]
        mixed = sum(power / sum(powers) * patch for power, patch in zip(powers, patches, strict=True))
        out.append(weight * cls + (1 - weight) * mixed)
    return torch.stack(out)


PLANS = {f"anchor@out(k={K},m={M},rest=zero)": (4, False), f"anchor@2(k={K},m={M})": (2, True)}


@pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("fusion", "weight", "temperature"),
    [("weighted", 0.8, 1.0), ("weighted", 0.3, 0.1), ("weighted", 0.0, 1.0), ("weighted", 0.0, 5.0), ("mean", 0.8, 0.1)],
)
def test_fusion_is_the_formula(tiny_clip, plan, fusion, weight, temperature):
    model, pixels = tiny_clip.make()[0].double(), images().double()  # it makes rounding errors much larger than they begin
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        got = fused_feature(model, pixels, handle, fusion, weight, temperature)
        handle.remove()
        expected = by_formula(slow(model.visual, pixels, *PLANS[plan]), fusion, weight, temperature)
    assert_near(got.float(), expected)


@pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")
@pytest.mark.parametrize("plan", ["none", *PLANS])
def test_cls_is_the_stock_feature_bit_for_bit(tiny_clip, plan):
    model = tiny_clip.make()[0]
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        expected = model.encode_image(images())
        assert torch.equal(fused_feature(model, images(), handle), expected)
        assert torch.equal(fused_feature(model, images(), handle, "weighted", 1.0), expected)
        assert not torch.equal(fused_feature(model, images(), handle, "weighted"), expected)
    if "out" in plan:  # selection at the output leaves the feature alone
        with torch.no_grad():  # the blocks that a plan opens run in other kernels
            assert_near(expected, model.encode_image(images()), steps=10_000)


@pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")
@pytest.mark.parametrize("normalize", ["minmax", "none"])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_anchors_weigh_at_least_as_much_as_any_other_patch(tiny_clip, normalize, temperature):
    """Their diversity is 0 by construction, so that by S alone they would weigh least."""
    model = tiny_clip.make()[0]
    with torch.no_grad(), tokensieve.apply(model, f"anchor@out(k={K},m={M},normalize={normalize},rest=zero)") as handle:
        _, tokens = get_image_features_with_tokens(model, images())
        _, share = token_fusion._selected(tokens, handle, temperature)  # (3, K+M)
    cut = handle.stages[-1][1]
    is_anchor = (cut.index[..., None] == cut.anchors[:, None]).any(-1)  # (3, K+M)
    own = cut.scores.gather(1, cut.index)
    for b in range(3):
        assert share[b][is_anchor[b]].min() >= share[b][~is_anchor[b]].max()
        assert own[b][is_anchor[b]].mean() < own[b][~is_anchor[b]].mean()
    torch.testing.assert_close(share.sum(-1), torch.ones(3))


def test_without_scores_or_without_a_cut_all_patches_count_alike(tiny_clip):
    model = tiny_clip.make()[0]
    with torch.no_grad():
        mean = fused_feature(model, images(), fusion="mean")
        weighted = fused_feature(model, images(), fusion="weighted", weight=0.5)
        assert_near(weighted, 0.5 * model.encode_image(images()) + 0.5 * mean)
        x = model.visual._embeds(images())
        for block in model.visual.transformer.resblocks:
            x = block(x)
        assert_near(mean, (model.visual.ln_post(x[:, 1:]) @ model.visual.proj).mean(1))
        with tokensieve.apply(model, "grid@2:6") as handle:
            mean = fused_feature(model, images(), handle, "mean")
            weighted = fused_feature(model, images(), handle, "weighted", 0.0)
            assert handle.stages[-1][1].scores is None
    assert_near(weighted, mean)


def test_merged_tokens_count_as_often_as_they_stand_for_patches(tiny_clip):
    model = tiny_clip.make()[0]
    plan = f"random@1:12 + anchor@2:6(k={K},rest=merge)"
    with torch.no_grad(), tokensieve.apply(model, plan) as handle, handle.call(samples=torch.arange(3)):
        got = fused_feature(model, images(), handle, "weighted", 0.0)
        mean = fused_feature(model, images(), handle, "mean")
        _, tokens = get_image_features_with_tokens(model, images())
        last = handle.stages[-1][1]
        for b in range(3):
            sizes = torch.bincount(last.groups[b], minlength=6).tolist()
            assert sum(sizes) == 12
            patches = [model.visual.ln_post(token) @ model.visual.proj for token in tokens[b]]
            scores = [1.0 if i in last.anchors[b] else last.scores[b, i].item() for i in last.index[b].tolist()]
            powers = [size * math.exp(score) for size, score in zip(sizes, scores, strict=True)]
            by_hand = sum(power / sum(powers) * patch for power, patch in zip(powers, patches, strict=True))
            assert_near(got[b], by_hand)
            by_hand = sum(size / 12 * patch for size, patch in zip(sizes, patches, strict=True))
            assert_near(mean[b], by_hand)


def test_a_feature_that_the_model_normalises_is_mixed_before_that():
    from tokensieve import embedded
    from tokensieve.models import loading

    name = next(name for name in embedded.MODELS if "coca" in name)
    model, pixels = loading.load(name, embedded.default_weights(name)).model, torch.randn(2, 3, 112, 112)
    with torch.no_grad():
        cls = model.encode_image(pixels, normalize=False)
        assert torch.equal(fused_feature(model, pixels), model.encode_image(pixels))  # the stock feature has length 1
        assert torch.equal(fused_feature(model, pixels, fusion="weighted", weight=1.0), cls)
        mean = fused_feature(model, pixels, fusion="mean")
        mixed = fused_feature(model, pixels, fusion="weighted", weight=0.7)
    assert_near(mixed, 0.7 * cls + 0.3 * mean)
    assert (cls.norm(dim=-1) > 2).all()


@pytest.mark.parametrize("kind", ["clip", "siglip", "siglip2", "dinov2", "dinov3", "vit"])
@pytest.mark.parametrize("plan", ["none", "anchor@2(k=3,m=4)"])
def test_every_family_fuses_to_its_own_width(kind, plan):
    model = hf_models.build(kind)
    pixels = torch.randn(2, 3, 48, 48)
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        stock = encode_image(model, pixels)
        for fusion in ("weighted", "mean"):
            fused = fused_feature(model, pixels, handle, fusion)
            assert fused.shape == stock.shape and fused.isfinite().all() and not torch.equal(fused, stock)
        assert torch.equal(fused_feature(model, pixels, handle), stock)


def test_under_autocast_the_feature_keeps_its_type(tiny_clip):
    model = tiny_clip.make()[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), tokensieve.apply(model, "anchor@2(k=3,m=4)") as handle:
        stock = encode_image(model, images())
        fused = fused_feature(model, images(), handle, "weighted")
    assert fused.dtype == stock.dtype and fused.isfinite().all()


def test_errors_say_what_is_allowed(tiny_clip):
    import timm

    model = tiny_clip.make()[0]
    with pytest.raises(UserError, match=r"token_fusion_weight 1.5 is outside \[0, 1\]"):
        fused_feature(model, images(), fusion="weighted", weight=1.5)
    with pytest.raises(UserError, match=r"outside \[0, 1\]"):
        fused_feature(model, images(), fusion="weighted", weight=math.nan)
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UserError, match=r"token_fusion_temperature .* is not a finite number above 0"):
            fused_feature(model, images(), fusion="weighted", temperature=temperature)
    with pytest.raises(UserError, match=r"'weigted' is not one of cls, weighted, mean. Did you mean 'weighted'"):
        fused_feature(model, images(), fusion="weigted")
    resnet = timm.create_model("resnet10t").eval()
    with pytest.raises(Uncuttable):
        fused_feature(resnet, images(), fusion="mean")
    with torch.no_grad():
        assert fused_feature(resnet, images()).shape == (3, 512)
