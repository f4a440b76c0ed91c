"""What a plan loses against the full model, sample by sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokensieve.evaluation.rows import add_losses
from tokensieve.tasks.base import SampleScores


def row(plan: str) -> dict[str, Any]:
    return {"reduction": {"plan": plan}}


def test_the_paired_difference_and_its_error() -> None:
    full, plan = [1.0, 1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    rows = [row("random:6"), row("none"), row("unscored")]
    each = torch.arange(6)
    add_losses(rows, [SampleScores(torch.tensor(plan), each), SampleScores(torch.tensor(full), each), None])
    differences = [a - b for a, b in zip(full, plan, strict=True)]
    mean = sum(differences) / 6
    spread = math.sqrt(sum((value - mean) ** 2 for value in differences)) / 6
    assert rows[0]["reduction"]["lost"] == pytest.approx(mean)
    assert rows[0]["reduction"]["lost_stderr"] == pytest.approx(spread)
    assert rows[1] == row("none") and rows[2] == row("unscored")


def test_samples_of_one_image_are_not_independent() -> None:
    rows = [row("none"), row("random:6")]
    scores = [torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])]
    groups = torch.tensor([0, 0, 1, 1])
    add_losses(rows, [SampleScores(values, groups) for values in scores])
    # differences are 0, 0, 1, 1, off their mean by -0.5, -0.5, 0.5, 0.5, summed up by image: -1 and 1
    assert rows[1]["reduction"]["lost_stderr"] == pytest.approx(math.sqrt(2) / 4)


def test_without_the_full_model_nothing_is_compared() -> None:
    rows = [row("random:6")]
    add_losses(rows, [SampleScores(torch.ones(2), torch.arange(2))])
    assert rows == [row("random:6")]
