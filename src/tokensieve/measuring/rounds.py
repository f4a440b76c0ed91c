"""Comparing plans with the full model in interleaved rounds.

In each round every variant runs once, in an order that rotates from round to round. Ratios are medians over the rounds of
ratios within a round, so that a machine that slows down for a while slows down all variants alike.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tokensieve.cutting.handle import Handle, apply
from tokensieve.device import timed
from tokensieve.errors import PlanWarning
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan


def detached_handle(model: nn.Module, plan: Plan | str, weights: Weights = None, seed: int = 0) -> Handle:
    """A new handle that is not attached. Its notes are part of the result rows, so they are not printed as warnings.

    weights: for plans with a trained method; others ignore them. seed: of random choices.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        with apply(model, plan, weights=weights if plan.is_trained else None, seed=seed) as handle:
            return handle


def median_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """The median over the rounds of slow / fast within a round."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def interleaved_seconds(calls: Sequence[Callable[[], Any]], device: torch.device, rounds: Iterable[int]) -> list[list[float]]:
    """The seconds of every call in every round. rounds: their numbers, from 0 on, or a progress bar over them."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in rounds:
        for number in [(turn + i) % len(calls) for i in range(len(calls))]:
            seconds[number].append(timed(calls[number], device)[1])
    return seconds
