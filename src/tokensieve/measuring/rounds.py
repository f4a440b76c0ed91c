"""Comparing plans with the full model in interleaved rounds.

In each round every variant runs once, in an order that rotates from round to round. Ratios are medians over the rounds of
ratios within a round, so that a machine that slows down for a while slows down all variants alike. Their spread is the
interquartile range: half of the rounds are within it.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from tokensieve.cutting.handle import Handle, apply
from tokensieve.errors import PlanWarning
from tokensieve.measuring.clock import Seconds, watch
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


class Ratio(NamedTuple):
    """A ratio of times: the median over the rounds, and the quartiles below and above it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, slow: Sequence[float], fast: Sequence[float]) -> Ratio:
        """Of slow / fast within each round."""
        ratios = [a / b for a, b in zip(slow, fast, strict=True)]
        if len(ratios) == 1:
            return cls(*ratios, *ratios, *ratios)
        return cls(statistics.median(ratios), *statistics.quantiles(ratios, n=4, method="inclusive")[::2])

    def entries(self, name: str) -> dict[str, float]:
        """As entries of a row."""
        return {name: self.median, f"{name}_low": self.low, f"{name}_high": self.high}


def phase_entries(name: str, ratios: Mapping[str, Ratio | None]) -> dict[str, dict[str, float | None]]:
    """Ratios by phase as entries of a row; None: there is nothing to compare."""
    found = {end: number for number, end in enumerate(("", "_low", "_high"))}
    return {
        f"{name}{end}": {phase: None if ratio is None else ratio[number] for phase, ratio in ratios.items()}
        for end, number in found.items()
    }


@dataclass
class Variant:
    """A call to be timed. within: entered around the call, before the clock starts; a plan is attached by it."""

    call: Callable[[], Any]
    within: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def run(self) -> Any:
        """The call, not timed."""
        with self.within:
            return self.call()

    def watch(self, device: torch.device) -> Seconds:
        """The time of the call."""
        with self.within:
            return watch(self.call, device)


def rotated(count: int, rounds: Iterable[int]) -> Iterator[int]:
    """The numbers of the variants in the order in which they run. rounds: their numbers, from 0 on, or a bar over them."""
    for turn in rounds:
        yield from ((turn + number) % count for number in range(count))


def interleaved(variants: Sequence[Variant], device: torch.device, rounds: Iterable[int]) -> list[list[Seconds]]:
    """The time of every variant in every round."""
    times: list[list[Seconds]] = [[] for _ in variants]
    for number in rotated(len(variants), rounds):
        times[number].append(variants[number].watch(device))
    return times
