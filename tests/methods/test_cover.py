"""The method cover and the options of merging, against slow formulas in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tokensieve
from tests.support.cover_reference import slow_farthest_points, slow_merge
from tests.support.rounding import assert_near
from tests.support.vlm_models import IMAGE, llava, prompts
from tokensieve import Plan, Reduction, UserError, View
from tokensieve.core import MAX_NORM_RATIO
from tokensieve.methods.cover import cover
from tokensieve.methods.farthest_points import farthest_points
from tokensieve.methods.registry import REGISTRY, get_method
from tokensieve.testing import make_view


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 0.5])
@pytest.mark.parametrize("k", [1, 4, 11, 20])
def test_the_formula(k: int, power: float) -> None:
    view = make_view(grid=(5, 4), width=8, heads=2)
    view.sizes = torch.randint(1, 5, view.tokens.shape[:2], generator=torch.Generator().manual_seed(k)).float()
    reduction = cover(view, k)
    reduction.norm = power
    out = reduction.apply(view.tokens)
    index, groups = farthest_points(view.tokens, k, 2.0)
    assert torch.equal(reduction.index, index)
    for image in range(len(out)):
        expected = slow_merge(view.tokens[image], groups[image].tolist(), view.sizes[image].tolist(), k, power)
        assert_near(out[image], torch.tensor(expected, dtype=torch.float64), steps=200)
    assert torch.equal(reduction.sizes.sum(1), view.sizes.sum(1))


@pytest.mark.parametrize("layer", [0, 3])
def test_the_formula_inside_a_decoder(layer: int) -> None:
    """What layer `layer` of a LLaVA gets: the text as it is, and the seeds' places with the merged vision tokens."""
    model, batch, k = llava(), prompts(words=(5, 8)), 7
    got: list[Tensor] = []
    norm = model.model.language_model.layers[layer].input_layernorm
    hook = norm.register_forward_pre_hook(lambda module, args: got.append(args[0]))
    with torch.no_grad():
        model(**batch)
        with tokensieve.apply(model, f"cover@llm.{layer}:{k}") as handle:
            model(**batch)
            chosen, sizes = handle.kept, handle.stages[0][1].sizes
    hook.remove()
    stock, cut = got
    assert chosen is not None and sizes is not None and cut.shape[1] == stock.shape[1] - (36 - k)
    for prompt, tokens in enumerate(stock):
        is_vision = batch["input_ids"][prompt] == IMAGE
        vision = tokens[is_vision]  # (36, D)
        seeds, groups, lead = slow_farthest_points(vision, k, 2.0)
        assert lead > 1e-5 and chosen[prompt].tolist() == seeds
        assert sizes[prompt].tolist() == [groups.count(group) for group in range(k)]
        merged = torch.tensor(slow_merge(vision, groups, [1.0] * 36, k, 2.0), dtype=torch.float64)
        expected = tokens.double()
        expected[is_vision.nonzero().flatten()[seeds]] = merged
        is_left = ~is_vision
        is_left[is_vision.nonzero().flatten()[seeds]] = True
        assert_near(cut[prompt], expected[is_left], steps=500)


def test_repeated_cuts_are_the_formula() -> None:
    view = make_view(grid=(5, 4), width=8, heads=2)
    sizes: list[list[float]] = view.sizes_or_ones().tolist()
    for k in (11, 6, 3):
        reduction = cover(view, k)
        reduction.norm = 2.0
        out = reduction.apply(view.tokens)
        groups = reduction.groups
        for image, tokens in enumerate(view.tokens):
            expected = slow_merge(tokens, groups[image].tolist(), sizes[image], k, 2.0)
            assert_near(out[image], torch.tensor(expected, dtype=torch.float64), steps=500)
            sizes[image] = [
                sum(size for size, group in zip(sizes[image], groups[image].tolist(), strict=True) if group == number)
                for number in range(k)
            ]
        assert reduction.sizes is not None and reduction.sizes.tolist() == sizes
        view = replace(view, tokens=out, sizes=reduction.sizes, grid=None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_seeds_and_means_stay_in_float32_under_autocast(dtype: torch.dtype) -> None:
    view = make_view(grid=(6, 6), width=16, heads=2)
    view.tokens[:, 3] *= 300
    plain = cover(view, 7)
    plain.norm = 2.0
    with torch.autocast("cpu", dtype=dtype):
        cast = cover(view, 7)
        cast.norm = 2.0
        out = cast.apply(view.tokens)
    assert torch.equal(cast.index, plain.index) and torch.equal(cast.groups, plain.groups)
    assert torch.equal(out, plain.apply(view.tokens))


def test_sizes_no_counts_every_token_as_one_also_after_a_merge(tiny_clip: Any) -> None:
    seen: list[Tensor | None] = []

    @tokensieve.method(summary="the first tokens; records the sizes that arrive")
    def recorder(view: View, keep: int) -> Reduction:
        seen.append(view.sizes)
        return Reduction.keep(torch.arange(keep).expand(view.tokens.shape[0], -1), view.n)

    model = tiny_clip.make()[0]
    images = torch.randn(2, 3, 48, 32, generator=torch.Generator().manual_seed(0))
    try:
        with tokensieve.apply(model, "cover@1:9 + recorder@1:8 + cover@2:5(sizes=no) + recorder@2:4"), torch.no_grad():
            model.encode_image(images)
    finally:
        REGISTRY.remove("recorder")
    assert seen[0] is not None and seen[0].sum(1).tolist() == [24.0, 24.0]
    assert seen[1] is not None and seen[1].tolist() == [[1.0] * 5] * 2


def merged(tokens: list[list[float]], power: float = 2.0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.tensor([tokens], dtype=dtype)
    groups = torch.zeros(x.shape[:2], dtype=torch.long)
    reduction = Reduction.merge(groups, torch.zeros(1, 1, dtype=torch.long), torch.ones(x.shape[:2]))
    reduction.norm = power
    return reduction.apply(x)[0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_stay_bounded(dtype: torch.dtype) -> None:
    opposite = merged([[1.0, 1e-3], [-1.0, 1e-3]], dtype=dtype)  # their mean is almost 0
    assert opposite.norm() <= MAX_NORM_RATIO and opposite.isfinite().all()
    assert merged([[1.0, 0.0], [-1.0, 0.0]], dtype=dtype).tolist() == [0.0, 0.0]
    assert merged([[0.0, 0.0], [0.0, 0.0]], dtype=dtype).tolist() == [0.0, 0.0]
    assert merged([[3.0, 0.0], [0.0, 0.0]], dtype=dtype).tolist() == [1.5, 0.0]  # a zero token shortens no direction
    huge = merged([[300.0, 0.0], [0.0, 1.0]], dtype=dtype)
    assert huge.isfinite().all() and huge.norm() <= 300.0


def test_the_options_of_merging_in_plans() -> None:
    assert Plan.parse("cover@3:16").steps[0].options == {"clip": 2.0, "norm": 2.0, "sizes": "yes"}
    assert str(Plan.parse("cover").steps[0].resolved_budget()) == "25%"
    assert Plan.parse("anchor@4:32(k=32,rest=merge,norm=2)").steps[0].options["norm"] == 2.0
    assert Plan.parse("pool@4:32").steps[0].options["norm"] == 0.0
    for text, reason in {
        "anchor@4:32(norm=2)": "add rest=merge",
        "random@4:32(rest=fuse,sizes=no)": "add rest=merge",
        "cover@4:32(norm=-1)": "norm=-1.0",
        "cover@4:32(norm=inf)": "norm=inf",
        "cover@4:32(norm=5)": "from 0 to 4",
        "cover@4:32(sizes=maybe)": "yes, no",
        "cover@4:32(clip=0)": "clip=0.0",
    }.items():
        with pytest.raises(UserError, match=reason):
            Plan.parse(text)
    assert "norm" not in get_method("merger").options  # it mixes by weights of its own


def test_without_options_merging_is_what_it_was(tiny_clip: object) -> None:
    model, _, _ = tiny_clip.make()  # type: ignore[attr-defined]
    images = torch.randn(3, 3, 48, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with tokensieve.apply(model, "anchor@2:8(k=4,rest=merge)"):
            plain = model.encode_image(images)
        with tokensieve.apply(model, "anchor@2:8(k=4,rest=merge,norm=0)"):
            assert torch.equal(model.encode_image(images), plain)
        with tokensieve.apply(model, "anchor@2:8(k=4,rest=merge,norm=2)"):
            assert not torch.equal(model.encode_image(images), plain)
        with tokensieve.apply(model, "cover@2:8") as handle:
            by_default = model.encode_image(images)
            assert handle.stages[0][1].norm == 2.0
        with tokensieve.apply(model, "cover@2:8(norm=2)"):
            assert torch.equal(model.encode_image(images), by_default)
        with tokensieve.apply(model, "cover@2:8(norm=0)"):
            assert not torch.equal(model.encode_image(images), by_default)
        with tokensieve.apply(model, "cover@2:8(sizes=no)") as handle:
            model.encode_image(images)
            assert handle.ledger[0].tokens_out == 8
            assert handle.stages[0][1].sizes is None


@pytest.mark.parametrize("plan", ["cover@0:12", "cover@1,2,3:50%", "cover@2.attn:5", "cover@out:7", "cover"])
def test_every_position(tiny_clip: object, plan: str) -> None:
    model, _, _ = tiny_clip.make()  # type: ignore[attr-defined]
    images = torch.randn(3, 3, 48, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        together = model.encode_image(images)
        kept = handle.kept
        for number in range(3):
            alone = model.encode_image(images[number : number + 1])
            assert_near(alone[0], together[number], steps=2000)
            assert kept is not None and handle.kept is not None and torch.equal(handle.kept[0], kept[number])
