"""One decision of a method, in the tower and in the decoder alike; notes for the user, and an observer for measuring."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from tokensieve.core import Reduction, View
from tokensieve.cutting.placement import Cut, count_note
from tokensieve.errors import NotFinite, PlanWarning, UserError
from tokensieve.plan import Step
from tokensieve.rest import apply_rest, with_merge_options


@runtime_checkable
class Observer(Protocol):
    """Measures the work that a plan adds to a model; set it as `Handle.observer`."""

    def plan_work(self) -> AbstractContextManager[Any]:
        """Entered around the work of the plan."""
        ...

    def model_work(self) -> AbstractContextManager[Any]:
        """Entered around the work of the model inside of it."""
        ...


class Notes:
    """Notes on what a plan does not do, each once, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: list[str] = []

    def add(self, note: str) -> bool:
        """Adds a note; False if it was added before."""
        with self._lock:
            is_new = note not in self._notes
            if is_new:
                self._notes.append(note)
        return is_new

    def warn(self, note: str) -> None:
        """Adds a note and warns the first time. While compiling, it does neither."""
        if not torch.compiler.is_compiling() and self.add(note):
            warnings.warn(note, PlanWarning, stacklevel=3)

    def to_list(self) -> list[str]:
        """All notes so far."""
        with self._lock:
            return list(self._notes)


class Chooser:
    """Runs the methods of a plan, in the tower and in the decoder alike.

    parts: trained modules by method name.
    """

    def __init__(self, parts: Mapping[str, nn.Module], check_finite: bool) -> None:
        self.parts = parts
        self.check_finite = check_finite
        self.notes = Notes()
        self.observer: Observer | None = None

    def part(self, step: Step) -> nn.Module | None:
        """The trained module of the step's method."""
        return self.parts.get(step.method.name)

    def makes_sizes(self, step: Step) -> bool:
        """Whether tokens have sizes after the step: it merges, or its gate (in training) multiplies sizes."""
        part = self.part(step)
        if part is not None and part.training:
            return True
        if step.merges:
            return step.keeps_sizes
        return not step.method.selects or step.rest != "drop"

    def tokens_to_keep(self, cut: Cut, n: int) -> int:
        """How many of n tokens are kept."""
        keep = cut.count(n)
        if keep < 1:
            raise UserError(f"{cut.step} at layer {cut.name} leaves no token of {n}")
        if (note := count_note(cut, n)) is not None:
            self.notes.warn(note)  # for images smaller than the configured size
        return keep

    def choose(self, cut: Cut, view: View, keep: int) -> Reduction:
        """The decision of the step's method, with its option `rest`. NaN would rank first, so it is an error."""
        checks = self.check_finite and not torch.compiler.is_compiling()
        if checks and not torch.isfinite(view.tokens.sum(dtype=torch.float32)):
            raise NotFinite(f"the tokens at layer {cut.name} contain NaN or infinity, so they cannot be ranked")
        chosen: Reduction = cut.step.method.decide(view, keep, **cut.step.arguments())
        if checks and chosen.scores is not None and not torch.isfinite(chosen.scores.sum(dtype=torch.float32)):
            raise NotFinite(f"{cut.step} at layer {cut.name}: its scores contain NaN or infinity")
        reduction = apply_rest(view, chosen, cut.step.rest)
        options = cut.step.options
        return with_merge_options(view, reduction, options["norm"], options["sizes"]) if cut.step.merges else reduction

    def plan_work(self) -> AbstractContextManager[Any]:
        """Reports work of the plan to the observer."""
        return nullcontext() if self.observer is None else self.observer.plan_work()

    def model_work(self) -> AbstractContextManager[Any]:
        """Reports work of the model to the observer."""
        return nullcontext() if self.observer is None else self.observer.model_work()
