"""Numbers that are not finite, types of numbers, and batches without an image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tests.support import vlm_models
from tests.support.engine_models import TOWERS, images, make_reid_model, make_tower
from tokensieve import UserError
from tokensieve.core import Question, Reduction, View
from tokensieve.cutting.choice import Chooser
from tokensieve.cutting.placement import Cut
from tokensieve.errors import NotFinite
from tokensieve.methods.cross import Heads
from tokensieve.methods.merger import Merger
from tokensieve.methods.registry import REGISTRY, get_method, method
from tokensieve.methods.sdtps import Sdtps
from tokensieve.models.features import encode_image
from tokensieve.models.registry import open_tower
from tokensieve.scoring import Attention
from tokensieve.testing import fresh_part

pytestmark = pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")

TOWER_PLANS = (
    *("anchor@2:9(k=3)", "anchor@2.attn:9(k=3,rest=merge)", "anchor@out:9(k=3,rest=fuse)", "learned@2:9", "tome", "cover@2:9"),
    *("random@1:9(rest=merge,norm=2)", "grid@0:9", "pool@1:9", "cover@1:20 + anchor@3:9(k=3)"),
)
VLM_PLANS = (
    *("anchor@llm.2:9(k=3)", "tome@llm.2:30", "cover@llm.1:7", "random@llm.1:6", "grid@llm.1:6", "pool@llm.1:6"),
    "frames@llm.1:6",
    *("merger@out:9", "cross@llm.2:7", "anchor@2:20(k=3) + anchor@llm.2:9(k=3,rest=merge)"),
)


def parts_for(plan: str, width: int) -> dict[str, nn.Module] | None:
    """The trained parts that a plan on a tower of this width or on the tiny LLaVA needs, untrained."""
    made: dict[str, nn.Module] = {}
    if "learned" in plan:
        made["learned"] = fresh_part(get_method("learned"), width)
    if "merger" in plan:
        made["merger"] = Merger(width, keep=9).eval()
    if "cross" in plan:
        made["cross"] = Heads(32, layers=(2,), d_internal=16, keep=(7,), arriving=36).eval()
    return made or None


def test_every_method_is_tried() -> None:
    """Published methods are tried in test_published_methods.py."""
    named = {name for name in REGISTRY if any(name in plan for plan in (*TOWER_PLANS, *VLM_PLANS))}
    published = {name for name, method in REGISTRY.items() if method.paper}
    assert named | published | {"none", "resize"} == set(REGISTRY)


# --- NaN and infinity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "plan", ["cover@0:5", "anchor@2:6(k=2)", "grid@3.attn:6", "random@out:6", "resize(size=24) + pool@2:4"]
)
@pytest.mark.parametrize("family", TOWERS)
def test_a_bad_image_is_an_error_with_the_layer_and_the_image(family: str, plan: str, bad: float) -> None:
    tower, x = make_tower(family), images(4, 0)
    x[2, 1, 5, 7] = bad
    layer = plan.split("@")[1].split(":")[0]
    with torch.no_grad(), tokensieve.apply(tower, plan) as handle:
        with pytest.raises(NotFinite, match=rf"layer {layer} contain NaN.*: image 2 of the batch \(number 2 of the run\)$"):
            encode_image(tower, x)
        assert handle.kept is None and handle.ledger == []
        with (
            handle.call(samples=torch.tensor([30, 31, 32, 33])),
            pytest.raises(NotFinite, match=r"image 2 of the batch \(number 32 of the run\)$"),
        ):
            encode_image(tower, x)
        x[0], x[1], x[3] = bad, bad, bad
        with pytest.raises(NotFinite, match="all 4 images of the batch; look at the weights"):
            encode_image(tower, x)


def test_values_that_distances_cannot_be_computed_of_are_an_error() -> None:
    tower, x = make_tower("timm"), images(3, 0)
    x[1] *= 1e25
    with torch.no_grad(), tokensieve.apply(tower, "cover@0:5"):
        with pytest.raises(NotFinite, match=r"layer 0 contain values above 1e\+16.*: image 1 of the batch"):
            tower(x)
        tower(x[[0, 2]])


@pytest.mark.parametrize("place", ["1", "out", "llm.0", "llm.2"])
def test_a_bad_image_of_a_vision_language_model(place: str) -> None:
    """Images are named by their order in the batch, whatever prompt they are in."""
    model, inputs = vlm_models.llava(), vlm_models.prompts((1, 2, 1), (4, 4, 4))
    inputs["pixel_values"][3, 0, 0, 0] = float("nan")
    message = rf"layer {place} contain NaN.*: image 3 of the batch \(number 13 of the run\)$"
    with torch.no_grad(), tokensieve.apply(model, f"grid@{place}:5") as handle:
        for call in (model, model.generate):
            with handle.call(samples=torch.arange(10, 14)), pytest.raises(NotFinite, match=message):
                call(**inputs)
            assert handle.kept is None and handle.stages == []


def test_a_bad_image_of_a_re_identification_model() -> None:
    model = make_reid_model()
    inputs = {name: images(2, number, (32, 16)) for number, name in enumerate(("RGB", "TI"))}
    inputs["TI"][1, 0, 0, 0] = float("nan")
    for plan in ("random@1:4", "random@out:3"):
        with torch.no_grad(), tokensieve.apply(model, plan), pytest.raises(NotFinite, match=r": image 1 of the batch \(TI\)$"):
            model.encode(inputs)


def test_bad_scores_are_an_error_with_the_layer_and_the_image() -> None:
    try:

        @method()
        def first_is_bad(view: View, keep: int) -> Reduction:
            scores = view.tokens.float().norm(dim=-1)
            scores[0, 3] = torch.nan
            return Reduction.keep(scores.topk(keep).indices, view.n, scores=scores)

        tower = make_tower("timm")
        message = r"scores at layer 2 contain NaN or infinity, image 0 of the batch \(number 0 of the run\)$"
        with torch.no_grad(), tokensieve.apply(tower, "first_is_bad@2:5"), pytest.raises(NotFinite, match=message):
            tower(images(2, 0))
        with torch.no_grad(), tokensieve.apply(tower, "first_is_bad@2:5", check_finite=False):
            tower(images(2, 0))
    finally:
        REGISTRY.remove("first_is_bad")


@pytest.mark.parametrize("family", TOWERS)
def test_bad_weights_are_an_error(family: str) -> None:
    tower = make_tower(family)
    with torch.no_grad():
        mlp: Any = open_tower(tower).blocks[1].module.mlp
        next(mlp.parameters())[0, 0] = torch.nan
    with torch.no_grad(), tokensieve.apply(tower, "grid@-1:5"), pytest.raises(NotFinite, match="look at the weights"):
        encode_image(tower, images(3, 0))


# --- types of numbers ---------------------------------------------------------------------------------------------

Decision = tuple[Cut, View, int, Reduction]


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Decision]]:
    """Every decision of a method, with what it saw."""
    made: list[Decision] = []
    choose = Chooser.choose

    def record(self: Chooser, cut: Cut, view: View, keep: int, numbers: Tensor | None = None) -> Reduction:
        reduction = choose(self, cut, view, keep, numbers)
        made.append((cut, view, keep, reduction))
        return reduction

    monkeypatch.setattr(Chooser, "choose", record)
    yield made


def in_float32(view: View) -> View:
    """The same numbers as float32. In a tower the log-sum-exp of the attention is computed again."""
    seen, question = view.attention, view.question
    if seen is not None:
        bias = None if seen.bias is None else seen.bias.to(seen.q.dtype).float()
        lse = seen.lse if view.place.startswith("llm") else None
        seen = Attention(seen.q.float(), seen.k.float(), seen.prefix, seen.scale, bias, lse, seen.has_cls)
    if question is not None:
        question = Question(question.tokens.float(), question.mask)
    return replace(view, tokens=view.tokens.float(), prefix=view.prefix.float(), attention=seen, question=question)


def check_decisions(made: list[Decision]) -> None:
    """The tokens were chosen as by a float32 computation on the same numbers."""
    assert made
    for cut, view, keep, reduction in made:
        assert not torch.is_autocast_enabled("cpu")
        exact = cut.step.method.decide(in_float32(view), keep, **cut.step.arguments())
        assert torch.equal(reduction.index[:, : exact.k], exact.index), str(cut.step)
        for values in (reduction.scores, reduction.weight, reduction.sizes):
            assert values is None or values.dtype == torch.float32


HALF = [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True), (torch.float16, True)]


@pytest.mark.parametrize(("dtype", "by_autocast"), HALF)
@pytest.mark.parametrize("plan", TOWER_PLANS)
@pytest.mark.parametrize("family", TOWERS)
def test_half_precision_chooses_as_float32_does(
    family: str, plan: str, dtype: torch.dtype, by_autocast: bool, decisions: list[Decision]
) -> None:
    tower, x = make_tower(family), images(4, 1)
    context: Any = torch.autocast("cpu", dtype) if by_autocast else nullcontext()
    if not by_autocast:
        tower, x = tower.to(dtype), x.to(dtype)
    with torch.no_grad(), tokensieve.apply(tower, plan, weights=parts_for(plan, 32)), context:
        encode_image(tower, x)
    check_decisions(decisions)


@pytest.mark.parametrize(("dtype", "by_autocast"), HALF)
@pytest.mark.parametrize("plan", VLM_PLANS)
def test_half_precision_in_a_vision_language_model(
    plan: str, dtype: torch.dtype, by_autocast: bool, decisions: list[Decision]
) -> None:
    model, inputs = vlm_models.llava(), vlm_models.prompts((1, 2, 1), (4, 3, 5))
    context: Any = torch.autocast("cpu", dtype) if by_autocast else nullcontext()
    if not by_autocast:
        model = model.to(dtype)
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    with torch.no_grad(), tokensieve.apply(model, plan, weights=parts_for(plan, 24)), context:
        model(**inputs)
    check_decisions(decisions)


@pytest.mark.parametrize("aggregation", ["mix", "merge"])
@pytest.mark.parametrize(("dtype", "by_autocast"), HALF)
def test_half_precision_in_a_re_identification_model(
    dtype: torch.dtype, by_autocast: bool, aggregation: str, decisions: list[Decision]
) -> None:
    model = make_reid_model()
    part = Sdtps(32, patches=8, modalities=("RGB", "NI", "TI"), aggr_ratio=0.75, place="out", aggregation=aggregation).eval()
    inputs: dict[str, Tensor] = {name: images(3, number, (32, 16)) for number, name in enumerate(("RGB", "TI"))}
    context: Any = torch.autocast("cpu", dtype) if by_autocast else nullcontext()
    if not by_autocast:
        model, inputs = model.to(dtype), {name: value.to(dtype) for name, value in inputs.items()}
    with torch.no_grad(), tokensieve.apply(model, f"sdtps@out(aggregation={aggregation})", weights={"sdtps": part}), context:
        model.encode(inputs)
    check_decisions(decisions)


# --- batches without an image -------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [*TOWER_PLANS, "anchor@out:6(k=2,rest=zero)", "resize(size=24)"])
@pytest.mark.parametrize("family", ["timm", "timm_map"])  # the others fail without a plan too
def test_an_empty_batch(family: str, plan: str) -> None:
    tower = make_tower(family)
    empty = images(0, 0)
    with torch.no_grad():
        stock = tower(empty)
        with tokensieve.apply(tower, plan, weights=parts_for(plan, 32)) as handle:
            out = tower(empty)
            assert out.shape == stock.shape == (0, 32) and out.dtype == stock.dtype
            assert handle.samples is not None and handle.samples.shape == (0,)
            assert handle.ledger and all(row.tokens_out <= row.tokens_in for row in handle.ledger)
            if handle.stages:
                assert handle.kept is not None and handle.kept.shape == (0, handle.ledger[-1].tokens_out)
                assert handle.groups is not None and handle.groups.shape[0] == 0
            assert tower(images(2, 0)).shape == (2, 32)


@pytest.mark.parametrize("plan", ["sdtps@out", "random@1:4", "pool@out:4", "anchor@2:3(k=1,rest=merge)"])
def test_an_empty_batch_of_a_re_identification_model(plan: str) -> None:
    model = make_reid_model()
    empty = {name: images(0, 0, (32, 16)) for name in ("RGB", "TI")}
    part = Sdtps(32, patches=8, modalities=("RGB", "NI", "TI"), aggr_ratio=0.75).eval()
    with torch.no_grad():
        stock = model.encode(empty)
        with tokensieve.apply(model, plan, weights={"sdtps": part} if "sdtps" in plan else None):
            assert model.encode(empty).shape == stock.shape


@pytest.mark.parametrize("family", ["open_clip", "eva", "hf"])
def test_an_empty_batch_that_the_stock_model_cannot_run(family: str) -> None:
    tower = make_tower(family)
    with torch.no_grad(), pytest.raises(RuntimeError):
        encode_image(tower, images(0, 0))
    with torch.no_grad(), tokensieve.apply(tower, "grid@2:5") as handle:
        with pytest.raises(RuntimeError):
            encode_image(tower, images(0, 0))
        assert handle.kept is None
        encode_image(tower, images(1, 0))


def test_samples_of_a_wrong_number_are_refused_for_an_empty_batch() -> None:
    tower = make_tower("timm")
    with torch.no_grad(), tokensieve.apply(tower, "random@1:5") as handle:
        with handle.call(samples=torch.arange(2)), pytest.raises(UserError, match="2 indices, but the batch has 0"):
            tower(images(0, 0))
        with handle.call(samples=torch.arange(0)):
            assert tower(images(0, 0)).shape == (0, 32)
