"""What plans lose of a task's main metric, sample by sample, against the formula written slowly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tokensieve.evaluation.rows import add_losses
from tokensieve.tasks.base import Task

Records = dict[str, list[Any]]


def slow_loss(full: Sequence[float], plan: Sequence[float], groups: Sequence[int]) -> tuple[float, float]:
    """Mean of the differences and its standard error, where samples of one group depend on each other."""
    differences = [a - b for a, b in zip(full, plan, strict=True)]
    mean = sum(differences) / len(differences)
    sums = [sum(d - mean for d, of in zip(differences, groups, strict=True) if of == group) for group in set(groups)]
    return mean, math.sqrt(sum(value**2 for value in sums)) / len(differences)


def assert_paired(
    task: Task, records: tuple[Records, Records], expected: tuple[Sequence[float], Sequence[float]], groups: Sequence[int]
) -> None:
    """The scores of the full model and of a plan are these, their means are the metric, and the loss is that of pairs."""
    scores = []
    for found, values in zip(records, expected, strict=True):
        score = task.sample_scores(found)
        assert score is not None and score.values.tolist() == pytest.approx(list(values), abs=1e-9)
        assert float(score.values.mean()) == pytest.approx(task.metrics(found)[task.metric], abs=1e-9)
        scores.append(score)
    rows: list[dict[str, Any]] = [{"reduction": {"plan": "none"}}, {"reduction": {"plan": "random:5"}}]
    add_losses(rows, scores)
    lost, error = slow_loss(*expected, groups)
    assert lost != 0 and error > 0  # the test tells something
    assert (rows[1]["reduction"]["lost"], rows[1]["reduction"]["lost_stderr"]) == pytest.approx((lost, error), abs=1e-9)
