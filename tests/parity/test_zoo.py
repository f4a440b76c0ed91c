"""Published methods give the numbers of their released code."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor

import tokensieve
from tests.parity.golden import CASES, Arrays, assert_golden, assert_same_partition, read
from tokensieve import View
from tokensieve.core import Reduction
from tokensieve.methods import get_method
from tokensieve.methods.outliers import above_quartiles
from tokensieve.models.registry import open_tower
from tokensieve.testing import make_view

pytestmark = pytest.mark.parametrize("case", CASES)


def decide(name: str, view: View, keep: int, **options: object) -> Reduction:
    reduction: Reduction = get_method(name).decide(view, keep, **options)
    return reduction


def tower_view(arrays: Arrays, case: str, sized: bool = False) -> View:
    """Tokens with CLS first, and keys alone."""
    x, sizes = arrays[f"{case}_in_x"], arrays[f"{case}_in_size"][:, 1:, 0] if sized else None
    return make_view(tokens=x[:, 1:], prefix=x[:, :1], k=arrays[f"{case}_in_keys"], sizes=sizes, grid=None)


def output_view(arrays: Arrays, case: str) -> View:
    x = arrays[f"{case}_in_x"]
    return make_view(tokens=x[:, 1:], prefix=x[:, :1], q=arrays[f"{case}_in_q"], k=arrays[f"{case}_in_k"], grid=None)


def test_evit(case: str) -> None:
    arrays = read("evit")
    block = Block(32, 4, mlp_ratio=2, qkv_bias=True, norm_layer=torch.nn.LayerNorm).eval()
    weights = {key[2:]: value for key, value in arrays.items() if key.startswith("w_")}
    block.load_state_dict({re.sub(r"_(?=weight|bias|qkv|proj|fc)", ".", name): value for name, value in weights.items()})
    model = VisionTransformer(img_size=56, patch_size=4, embed_dim=32, depth=1, num_heads=4, mlp_ratio=2, num_classes=0).eval()
    model.blocks[0] = block
    model.norm = torch.nn.Identity()
    x = arrays[f"{case}_in_x"]
    for plan, golden in (("evit@1.attn:70%", "fused"), ("topk@1.attn:70%", "topk")):
        with torch.no_grad(), tokensieve.apply(model, plan) as handle:
            out = model.blocks(x)
            kept = handle.stages[0][1].index[:, :138]
        wanted = arrays[f"{case}_out_{golden}_block_output"]
        for b in range(2):
            assert_same_set(out[b], wanted[b])
        assert torch.equal(kept, arrays[f"{case}_out_kept"].sort(1).values)
    with torch.no_grad():
        behind, attention = open_tower(model).blocks[0].attend(x)
        assert_golden(attention.cls_row(), arrays[f"{case}_out_cls_attention"])
        view = View(tokens=behind[:, 1:], prefix=behind[:, :1], grid=(14, 14), attention=attention)
        fused = decide("evit", view, 138).apply(behind, prefix=1)
    for b in range(2):
        assert_same_set(fused[b], arrays[f"{case}_out_fused_cut_tokens"][b])


def assert_same_set(tokens: Tensor, golden: Tensor) -> None:
    """The same tokens (K, D), in any order."""
    partner = torch.cdist(tokens, golden).argmin(1)
    assert len(partner.unique()) == len(golden) == len(tokens)
    assert_golden(tokens, golden[partner])


@pytest.mark.parametrize("k", [5, 11])
def test_dpcknn(case: str, k: int) -> None:
    arrays = read("dpcknn")
    x = arrays[f"{case}_in_x"]
    reduction = decide("dpcknn", make_view(tokens=x, grid=None), 48, k=k)
    assert torch.equal(reduction.index, arrays[f"{case}_out_k{k}_centre"])
    assert torch.equal(reduction.groups, arrays[f"{case}_out_k{k}_label"])
    assert_golden(reduction.apply(x), arrays[f"{case}_out_k{k}_tokens"])
    weights = arrays[f"{case}_in_logw"][..., 0].exp()  # of learned scores, which the authors have in trained models
    weighted = Reduction.merge(reduction.groups, reduction.index, weights)
    assert_golden(weighted.apply(x), arrays[f"{case}_out_k{k}_weighted_tokens"])


@pytest.mark.parametrize("linkage", ["single", "complete", "average"])
@pytest.mark.parametrize("clusters", [140, 49])
def test_atc(case: str, linkage: str, clusters: int) -> None:
    arrays = read("atc")
    name = f"{case}_out_{linkage}{clusters}"
    view = tower_view(arrays, case, sized=True)
    reduction = decide("atc", view, clusters, linkage=linkage)
    groups = arrays[f"{name}_group"][:, 1:]
    assert_same_partition(reduction.groups, groups)
    assert reduction.sizes is not None
    assert torch.equal(reduction.sizes.gather(1, reduction.groups), arrays[f"{name}_sizes"].gather(1, groups))
    if (golden := arrays.get(f"{name}_tokens")) is not None:
        assert_golden(_of_each(reduction.apply(view.tokens), reduction.groups), _of_each(golden, groups))


@pytest.mark.parametrize(("name", "number"), [("bsm", 0), ("pitome", 1), ("pitome70", 2)])
def test_pitome(case: str, name: str, number: int) -> None:
    arrays = read("pitome")
    ratio, margin, is_bsm = arrays["hp_ratio_margin_bsm"][number].tolist()
    golden = f"{case}_out_{name}"
    keep = arrays[f"{golden}_tokens"].shape[1] - 1
    assert keep == 196 - int(196 - 196 * ratio)  # of the patches
    form = "all" if is_bsm else "protected"
    view = tower_view(arrays, case, sized=True)
    reduction = decide("pitome", view, keep, margin=margin, form=form)
    groups = arrays[f"{golden}_group"][:, 1:]
    assert_same_partition(reduction.groups, groups)
    assert reduction.sizes is not None
    assert torch.equal(reduction.sizes.gather(1, reduction.groups), arrays[f"{golden}_sizes"].gather(1, groups))
    assert_golden(_of_each(reduction.apply(view.tokens), reduction.groups), _of_each(arrays[f"{golden}_tokens"], groups))


def _of_each(outputs: Tensor, groups: Tensor) -> Tensor:
    """For each input token the output token that it went into: (B, K, D), (B, N) -> (B, N, D)."""
    return outputs.gather(1, groups[..., None].expand(-1, -1, outputs.shape[2]))


@pytest.mark.parametrize(("dominant", "contextual"), [(54, 10), (33, 7)])
def test_visionzip(case: str, dominant: int, contextual: int) -> None:
    arrays = read("visionzip")
    view, name = output_view(arrays, case), f"{case}_out_d{dominant}c{contextual}"
    reduction = decide("visionzip", view, dominant + contextual, contextual=contextual)
    patches = arrays[f"{name}_dominant_by_score"].sort(1).values[:, 1:] - 1  # the first is CLS
    assert torch.equal(reduction.index[:, : dominant - 1], patches)
    outputs = torch.cat([view.prefix, reduction.apply(view.tokens)], dim=1)
    assert_golden(outputs, arrays[f"{name}_tokens"])
    assert_golden(reduction.as_weight()[:, dominant - 1 :], arrays[f"{name}_context_weight"][..., 1:])
    if (dominant, contextual) == (54, 10):
        assert torch.equal(decide("visionzip", view, 64).index, reduction.index)


@pytest.mark.parametrize(("tokens", "alpha"), [(64, 1), (32, 1), (32, 2)])
def test_scope(case: str, tokens: int, alpha: int) -> None:
    arrays = read("scope")
    view = output_view(arrays, case)
    reduction = decide("scope", view, tokens, alpha=float(alpha))
    assert reduction.scores is not None
    assert_golden(reduction.scores, arrays[f"{case}_out_score"])
    assert torch.equal(reduction.index, arrays[f"{case}_out_t{tokens}a{alpha}_kept"])
    picked = arrays[f"{case}_out_t{tokens}a{alpha}_picked_in_order"]
    for count in range(1, tokens):  # greedy: what is chosen of fewer tokens are the first of them
        assert torch.equal(decide("scope", view, count, alpha=float(alpha)).index, picked[:, :count].sort(1).values)


@pytest.mark.parametrize(("tokens", "alpha"), [(64, 0.1), (192, 0.1), (128, 0.5)])
def test_hiprune(case: str, tokens: int, alpha: float) -> None:
    arrays = read("hiprune")
    pair = arrays[f"{case}_in_obj_q"], arrays[f"{case}_in_obj_k"]
    view = make_view(
        tokens=torch.zeros(2, 576, 32),
        q=arrays[f"{case}_in_deep_q"],
        k=arrays[f"{case}_in_deep_k"],
        earlier={9: pair},
        grid=(24, 24),
    )
    assert_golden(view.earlier[9].received(), arrays[f"{case}_out_object_score"])
    reduction = decide("hiprune", view, tokens, alpha=alpha)
    assert reduction.scores is not None
    assert_golden(reduction.scores, arrays[f"{case}_out_deep_score"])
    assert torch.equal(reduction.index, arrays[f"{case}_out_t{tokens}a{round(100 * alpha)}_kept"])


def test_prumerge(case: str) -> None:
    arrays = read("prumerge")
    x, q, k = (arrays[f"{case}_in_{name}"] for name in ("x", "q", "k"))
    view = make_view(tokens=x[:, 1:], prefix=x[:, :1], q=q[:, None], k=k[:, None], grid=(24, 24))
    adaptive, attention = decide("prumerge", view, 576), arrays[f"{case}_out_cls_attention"]
    assert adaptive.scores is not None and adaptive.counts is not None
    assert_golden(adaptive.scores, attention)
    for b in range(2):
        ratio = arrays[f"{case}_out_b{b}_ratio"]
        assert_golden(above_quartiles(adaptive.scores[b : b + 1]).float().mean(), ratio)
        assert int(adaptive.counts[b]) == round(576 * float(ratio)) + 1
    for name, reduction in (
        ("prumerge_tokens", adaptive),
        ("plus_tokens", decide("prumerge_plus", view, 576)),
        ("prumerge_fixed16th_tokens", decide("prumerge", view, 36, adaptive=False)),
    ):
        outputs = reduction.apply(view.tokens)
        for b in range(2):
            if (golden := arrays.get(f"{case}_out_b{b}_{name}")) is not None:
                assert reduction.counts is not None and int(reduction.counts[b]) == len(golden)
                assert_same_set(outputs[b, : len(golden)], golden)


@pytest.mark.parametrize(("ratio", "keep"), [("r98", 25), ("r250", 64)])
def test_divprune(case: str, ratio: str, keep: int) -> None:
    arrays = read("divprune")
    view = make_view(tokens=arrays[f"{case}_in_x"], grid=None)
    assert torch.equal(decide("divprune", view, keep).index, arrays[f"{case}_out_{ratio}_kept"])
    picked = arrays[f"{case}_out_{ratio}_picked_in_order"]
    for count in range(1, keep):  # greedy: what is chosen of fewer tokens are the first of them
        assert torch.equal(decide("divprune", view, count).index, picked[:, :count].sort(1).values)


@pytest.mark.parametrize("tokens", [64, 25])
def test_cdpruner(case: str, tokens: int) -> None:
    arrays = read("cdpruner")
    x, embeds, text = (arrays[f"{case}_in_{name}"] for name in ("x", "image_embeds", "text_embeds"))
    for texts, golden in ((text.expand(2, -1, -1), "single"), (text[:1].expand(2, 1, -1), "single_one_text")):
        view = make_view(tokens=x, image_embeds=embeds, text=texts, grid=None)
        reduction = decide("cdpruner", view, tokens)
        assert torch.equal(reduction.index, arrays[f"{case}_out_t{tokens}_kept_{golden}"])


@pytest.mark.parametrize(("ratio", "keep"), [("r50", 128), ("r75", 64), ("r90", 26)])
def test_fastv(case: str, ratio: str, keep: int) -> None:
    arrays = read("fastv")
    q, k, hidden = (arrays[f"{case}_in_{name}"] for name in ("q", "k", "hidden"))
    view = make_view(tokens=hidden[:, 7:263], q=q, k=k, span=(7, 263), grid=(16, 16))
    reduction = decide("fastv", view, keep)
    assert reduction.scores is not None
    assert_golden(reduction.scores, arrays[f"{case}_out_score"])
    assert torch.equal(reduction.index, arrays[f"{case}_out_{ratio}_kept_visual"])
    words = torch.tensor([*range(7), *range(263, 276)]).expand(2, -1)
    positions = torch.cat([words, reduction.index + 7], dim=1).sort(1).values  # tokens keep theirs
    assert torch.equal(positions, arrays[f"{case}_out_{ratio}_kept_positions"])


@pytest.mark.parametrize(("ratio", "keep"), [("keep50", 128), ("keep25", 64)])
def test_pyramiddrop(case: str, ratio: str, keep: int) -> None:
    arrays = read("pyramiddrop")
    hidden, norm, wq, wk = (arrays[f"{case}_in_{name}"] for name in ("hidden", "norm", "wq", "wk"))
    normed = F.rms_norm(hidden, (32,), norm, eps=1e-6)
    q, k = (_rotate((normed @ weight.T).unflatten(-1, (4, 8)).transpose(1, 2)) for weight in (wq, wk))
    for b, padding in enumerate((0, 4)):
        end = 276 - padding
        view = make_view(
            tokens=hidden[b : b + 1, 7:263], q=q[b : b + 1, :, :end], k=k[b : b + 1, :, :end], span=(7, 263), grid=(16, 16)
        )
        index = decide("pyramiddrop", view, keep).index[0]
        assert torch.equal(index, arrays[f"{case}_out_{ratio}_kept_visual"][b])
        real = arrays[f"{case}_out_{ratio}_mask"][b].bool()
        assert int(real.sum()) == end - 256 + len(index)
        # the authors number what is left anew, which is none of our numbers: tokens keep theirs here
        assert torch.equal(arrays[f"{case}_out_{ratio}_positions"][b][real], torch.arange(int(real.sum())))


def _rotate(x: Tensor) -> Tensor:
    """Rotary positions with base 10,000, pairs half a head apart: (B, H, L, d)."""
    d = x.shape[-1]
    angles = torch.arange(x.shape[2])[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
