"""What a plan costs: predicted from operation counts, which are fitted to a few plans and corrected by a few measured times.

The operations of a block are a polynomial of second degree in its tokens, so those of a model are a linear function of

    1,  patches of the image,  sum of n and sum of n^2 over the blocks of the tower,  the same two over the language model.

A time is not an operation count. For every method one plan is timed, and its exponent a = log(measured) / log(ratio of
operations) turns a ratio of operations into the speed-up that is expected of other plans of this method. Plans that are
measured later replace these first exponents.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokensieve.errors import UserError
from tokensieve.plan import Budget, Plan
from tokensieve.tuning.outline import Outline
from tokensieve.tuning.space import EVERY, RESIZE, Candidate, Space

EXPONENTS = (0.4, 1.5)  # the range of a
SPREAD = (0.7, 1.3)  # the range of a method's a, in shares of the median of all methods


def probe_plans(outline: Outline) -> list[Plan]:
    """A few plans whose operations show the coefficients: early and late cuts to many and to few tokens."""
    n, depth, decoder = outline.tokens, outline.depth, outline.decoder
    places = [str(max(1, depth // 4)), str(max(1, depth // 2))] if depth else []
    if decoder is not None:
        places += ["out", f"llm.{max(1, decoder // 2)}"] if depth else ["llm.0", f"llm.{max(1, decoder // 2)}"]
    plans = [Plan(), *(Plan.parse(f"random@{place}:{max(1, n // part)}") for place in places for part in (2, 4, 8))]
    if depth and not outline.no_resize_reason:
        plans.append(Plan.parse(f"{RESIZE}(size={max(1, outline.side // 2) * outline.patch})"))
    return plans


@dataclass
class Costs:
    """Predicts operations and speed-ups. gflops: (plan) -> counted GFLOPs of one image."""

    space: Space
    coefficients: Sequence[float]
    exponents: dict[str, float] = field(default_factory=dict)  # by method

    @classmethod
    def fit(cls, space: Space, gflops: Callable[[Plan], float]) -> Costs:
        """Counts the operations of a few plans and fits the coefficients."""
        plans = probe_plans(space.outline)
        counted = np.array([gflops(plan) for plan in plans])
        terms = np.array([_terms(space.outline, plan) for plan in plans])
        scale = np.maximum(np.abs(terms).max(axis=0), 1e-12)
        solution = np.linalg.lstsq(terms / scale, counted, rcond=1e-10)[0] / scale
        return cls(space, [float(value) for value in solution])

    def operations(self, plan: Plan) -> float:
        """Predicted GFLOPs, without the method's own."""
        return max(1e-9, float(np.dot(_terms(self.space.outline, plan), self.coefficients)))

    def ratio(self, plan: Plan) -> float:
        return self.operations(Plan()) / self.operations(plan)

    def exponent(self, method: str) -> float:
        """Of the method, or the median of those that are known."""
        if method in self.exponents or not self.exponents:
            return self.exponents.get(method, 1.0)
        return statistics.median(self.exponents.values())

    def speedup(self, plan: Plan, method: str) -> float:
        """The speed-up that is expected of a plan of this method."""
        return math.pow(self.ratio(plan), self.exponent(method))

    def calibrate(self, measured: Sequence[tuple[str, Plan, float]]) -> None:
        """Takes measured speed-ups of plans, with their methods: the exponent of a method is the median over its plans."""
        found: dict[str, list[float]] = {}
        for method, plan, speedup in measured:
            log_ratio = math.log(self.ratio(plan))
            if log_ratio > 0.05 and speedup > 0:
                found.setdefault(method, []).append(min(max(math.log(speedup) / log_ratio, EXPONENTS[0]), EXPONENTS[1]))
        middle = statistics.median(value for values in found.values() for value in values) if found else 1.0
        low, high = (share * middle for share in SPREAD)  # what differs more is a machine with other load, not a method
        if found:
            self.exponents = {name: min(max(statistics.median(values), low), high) for name, values in found.items()}

    def at_goal(self, candidate: Candidate, goal: float) -> Plan | None:
        """The plan of the candidate with the most tokens that reaches the speed-up; None if it cannot, or need not cut."""
        space = self.space
        if candidate.method == RESIZE:
            return self._smaller_image(goal)
        arriving = space.arriving(candidate)
        if self.speedup(space.plan(Candidate(candidate.side, RESIZE)), RESIZE) >= goal:
            return None  # the smaller image alone is fast enough
        if candidate.position == EVERY:
            most = (arriving - 1) // space.outline.depth
            return self._first(candidate, goal, (Budget("remove", removed) for removed in range(1, most + 1)))  # type: ignore[arg-type]
        low, high, best = 1, arriving - 1, None
        while low <= high:
            middle = (low + high) // 2
            plan = space.plan(candidate, space.budget(middle, arriving))
            if self.speedup(plan, candidate.method) >= goal:
                best, low = plan, middle + 1
            else:
                high = middle - 1
        return best

    def at_keep(self, candidate: Candidate, keep: int) -> Plan | None:
        """The plan of the candidate that leaves so many tokens; of resizing alone the largest image with at most so many."""
        space = self.space
        if candidate.method == RESIZE:
            least, most = space.sides
            fitting = [side for side in range(least, most) if space.arriving(Candidate(side, RESIZE)) <= keep]
            return space.plan(Candidate(max(fitting), RESIZE)) if fitting else None
        arriving = space.arriving(candidate)
        return space.plan(candidate, space.budget(keep, arriving)) if keep < arriving else None

    def fastest(self) -> float:
        """The largest speed-up that a plan of the space can be expected to have."""
        space, reached = self.space, [1.0]
        for side in space.sides:
            for method in space.methods:
                for position in space.positions[:2]:
                    candidate = Candidate(side, method, position)
                    try:
                        budget = space.budget(1, space.arriving(candidate))
                        reached.append(self.speedup(space.plan(candidate, budget), method))
                    except UserError:  # it needs the attention of a block
                        continue
            reached.append(self.speedup(space.plan(Candidate(side, RESIZE)), RESIZE))
        return max(reached)

    def _smaller_image(self, goal: float) -> Plan | None:
        least, most = self.space.sides
        for side in range(most - 1, least - 1, -1):
            plan = self.space.plan(Candidate(side, RESIZE))
            if self.speedup(plan, RESIZE) >= goal:
                return plan
        return None

    def _first(self, candidate: Candidate, goal: float, budgets: Any) -> Plan | None:
        for budget in budgets:
            plan = self.space.plan(candidate, budget)
            if self.speedup(plan, candidate.method) >= goal:
                return plan
        return None


def _terms(outline: Outline, plan: Plan) -> list[float]:
    blocks, layers = outline.counts(plan)
    image = Plan() if plan.image_step is None else Plan((plan.image_step,))
    patches = float(sum(outline.counts(image)[0][:1]))  # 0 where there is no tower
    return [1.0, patches, *(float(sum(n**power for n in counts)) for counts in (blocks, layers) for power in (1, 2))]
