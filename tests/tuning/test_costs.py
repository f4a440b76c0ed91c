"""Predicted costs, and the budgets that follow from them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tokensieve
from tokensieve.errors import UserError
from tokensieve.models import loading
from tokensieve.plan import Plan
from tokensieve.tuning.costs import Costs
from tokensieve.tuning.evaluator import Evaluator
from tokensieve.tuning.features import ImageFeatures
from tokensieve.tuning.images import Request
from tokensieve.tuning.outline import outline
from tokensieve.tuning.space import RESIZE, Candidate, Space, find_methods


@pytest.fixture(scope="module")
def evaluator(tiny_clip: SimpleNamespace, photos: Path) -> Evaluator:
    subject = ImageFeatures(Request(tiny_clip.name, [str(photos)]))
    subject.prepare(loading.load(tiny_clip.name, tiny_clip.weights))
    return Evaluator(subject, torch.device("cpu"), 5, 0)


@pytest.fixture(scope="module")
def costs(evaluator: Evaluator) -> Costs:
    space = Space(outline(evaluator.subject, evaluator.sample), tuple(find_methods(None, False)[0]), True)
    return Costs.fit(space, evaluator.gflops)


PLANS = ("random@1:5", "grid@3:20", "random@*:-4", "resize(size=24)", "resize(size=16) + random@2:3")


@pytest.mark.parametrize("plan", PLANS)
def test_the_counts_are_those_of_the_ledger(evaluator: Evaluator, costs: Costs, plan: str) -> None:
    evaluator.compute_full(5)
    _, handle = evaluator.measures(Plan.parse(plan), 5)
    blocks, layers = costs.space.outline.counts(Plan.parse(plan))
    n, expected = 24, []
    rows = {row.layer: row.tokens_out for row in handle.ledger}
    n = rows.get("image", n)
    for block in range(4):
        n = rows.get(str(block), n)
        expected.append(n)
    assert blocks == expected and layers == []


@pytest.mark.parametrize("plan", PLANS)
def test_operations_are_predicted(evaluator: Evaluator, costs: Costs, plan: str) -> None:
    assert costs.operations(Plan.parse(plan)) == pytest.approx(evaluator.gflops(Plan.parse(plan)), rel=1e-3)


@pytest.mark.parametrize(("side", "goal"), [(3, 2.6), (4, 2.0)])
def test_the_budget_is_the_largest_that_reaches_the_goal(costs: Costs, side: int, goal: float) -> None:
    plan = costs.at_goal(Candidate(side, "cover", "1"), goal)
    assert plan is not None and costs.speedup(plan, "cover") >= goal
    (step,) = plan.token_steps
    assert step.budget is not None
    more = Plan.parse(str(plan).replace(f":{step.budget}", f":{int(step.budget.amount) + 1}"))
    assert costs.speedup(more, "cover") < goal


def test_what_cannot_reach_a_goal_gives_no_plan(costs: Costs) -> None:
    assert costs.at_goal(Candidate(4, "cover", "3"), 2.0) is None  # a quarter of the blocks is left
    assert costs.at_goal(Candidate(2, "cover", "3"), 1.2) is None  # the smaller image alone is fast enough
    assert costs.at_goal(Candidate(0, RESIZE), 50.0) is None
    with pytest.raises(UserError, match="needs the attention"):
        costs.at_goal(Candidate(4, "anchor", "0"), 2.0)
    assert 3 < costs.fastest() < 100


def test_a_measured_time_corrects_the_prediction(costs: Costs) -> None:
    plan = Plan.parse("cover@1:4")
    own = Costs(costs.space, costs.coefficients)
    assert own.speedup(plan, "cover") == pytest.approx(own.ratio(plan))
    own.calibrate([("cover", plan, own.ratio(plan) ** power) for power in (0.45, 0.5, 0.9)])
    assert own.speedup(plan, "cover") == pytest.approx(own.ratio(plan) ** 0.5)
    assert own.speedup(plan, "grid") == own.speedup(plan, "cover")  # the median of what is known


def test_a_number_of_tokens(costs: Costs) -> None:
    assert str(costs.at_keep(Candidate(4, "cover", "1"), 7)) == "cover@1:7"
    assert costs.at_keep(Candidate(2, "cover", "1"), 6) is None  # 6 arrive
    assert str(costs.at_keep(Candidate(0, RESIZE), 13)) == "resize(size=24)"  # 12 patches; the next is the full image


def test_outputs_do_not_depend_on_batches(evaluator: Evaluator) -> None:
    """The first images of a plan are the same, whatever the batch: random choices go by the number of the image."""
    evaluator.compute_full(14)
    few, _ = evaluator.measures(Plan.parse("random@1:5"), 3)
    many, _ = evaluator.measures(Plan.parse("random@1:5"), 14)
    assert torch.allclose(few["distance"], many["distance"][:3], atol=1e-6)
    with tokensieve.apply(evaluator.model, "random@1:5"), torch.inference_mode():
        features = evaluator.model.encode_image(evaluator.subject.batch(0, 3))
    expected = 1 - torch.cosine_similarity(features.double(), evaluator.full[:3].double())
    assert torch.allclose(few["distance"], expected, atol=1e-6)
