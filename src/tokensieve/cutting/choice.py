"""One decision of a method: what it sees, what it chooses, what becomes of the rest, and who watches."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from tokensieve.core import Reduction, View
from tokensieve.cutting.placement import Cut, all_kept_note
from tokensieve.errors import NotFinite, PlanWarning, UserError
from tokensieve.plan import Step
from tokensieve.rest import apply_rest


class Observer(Protocol):
    """Watches what a plan adds to a model, for measuring: `Handle.observer`."""

    def plan_work(self) -> AbstractContextManager[Any]:
        """Entered around what a plan adds."""
        ...

    def model_work(self) -> AbstractContextManager[Any]:
        """Entered around what the model does inside of it."""
        ...


class Notes:
    """What a plan does not do, each thing once, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: list[str] = []

    def add(self, note: str) -> bool:
        """Adds a note; False where it is there already."""
        with self._lock:
            is_new = note not in self._notes
            if is_new:
                self._notes.append(note)
        return is_new

    def warn(self, note: str) -> None:
        """Adds a note and, the first time, warns of it. A graph that is compiled does neither."""
        if not torch.compiler.is_compiling() and self.add(note):
            warnings.warn(note, PlanWarning, stacklevel=3)

    def to_list(self) -> list[str]:
        with self._lock:
            return list(self._notes)


class Chooser:
    """Lets the steps of a plan decide, in the tower and in the decoder alike.

    parts: trained modules by the name of their method.
    """

    def __init__(self, parts: Mapping[str, nn.Module], check_finite: bool) -> None:
        self.parts = parts
        self.check_finite = check_finite
        self.notes = Notes()
        self.observer: Observer | None = None

    def part(self, step: Step) -> nn.Module | None:
        return self.parts.get(step.method.name)

    def makes_sizes(self, step: Step) -> bool:
        """Whether tokens have sizes after the step: it merges, or its gate, in training, is a factor of sizes."""
        part = self.part(step)
        return not step.method.selects or step.rest != "drop" or (part is not None and part.training)

    def tokens_to_keep(self, cut: Cut, n: int) -> int:
        """How many of the n tokens that arrive are kept."""
        keep = cut.budget.count(n)
        if keep < 1:
            raise UserError(f"{cut.step} at layer {cut.name} leaves no token of {n}")
        if keep == n:
            self.notes.warn(all_kept_note(cut, n))  # images smaller than the configured size
        return keep

    def choose(self, cut: Cut, view: View, keep: int) -> Reduction:
        """What the step's method decides, the rest included. NaN would be ranked first, so it is an error."""
        checks = self.check_finite and not torch.compiler.is_compiling()
        if checks and not torch.isfinite(view.tokens.sum(dtype=torch.float32)):
            raise NotFinite(f"the tokens at layer {cut.name} hold NaN or infinity, so nothing can be ranked there")
        chosen = cut.step.method.decide(view, keep, **cut.step.arguments())
        if checks and chosen.scores is not None and not torch.isfinite(chosen.scores.sum(dtype=torch.float32)):
            raise NotFinite(f"{cut.step} at layer {cut.name}: its scores hold NaN or infinity")
        return chosen if chosen.soft is not None else apply_rest(view, chosen, cut.step.rest)

    def plan_work(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.observer is None else self.observer.plan_work()

    def model_work(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.observer is None else self.observer.model_work()
