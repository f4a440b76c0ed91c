"""Trained parts of methods: found by the plan, read from files, checked against the tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from tokensieve.plan import Plan

Weights = str | Path | Sequence[str | Path] | Mapping[str, nn.Module] | None


def load_parts(plan: Plan, model: nn.Module, weights: Weights = None) -> dict[str, nn.Module]:
    """The trained module of every method of the plan that has one, by the method's name."""
    return {}
