"""One decision of a method, in the tower and in the decoder alike; notes for the user, and an observer for measuring."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.cutting.placement import Cut, count_note
from tokensieve.errors import NotFinite, PlanWarning, UserError
from tokensieve.plan import Step
from tokensieve.rest import apply_rest, with_merge_options

MAX_NAMED = 3  # images that a message names
LARGEST = 1e16  # of a token's entries: sums of their squares are finite in float32


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
        self._modules = {name: list(part.modules()) for name, part in parts.items()}
        self.check_finite = check_finite
        self.notes = Notes()
        self.observer: Observer | None = None

    def part(self, step: Step, device: torch.device) -> nn.Module | None:
        """The trained module of the step's method, moved to the device of the tokens: the model may have been moved."""
        part = self.parts.get(step.method.name)
        modules = () if part is None else self._modules[step.method.name]
        for parameter in (each for module in modules for each in module._parameters.values() if each is not None):
            if parameter.dtype != torch.float32:
                raise UserError(
                    f"{step}: the weights of {step.method.name} are {parameter.dtype}, but scores are computed in float32; "
                    "call .float() on them"
                )
            if parameter.device != device:
                assert part is not None
                part.to(device)
        return part

    def makes_sizes(self, step: Step) -> bool:
        """Whether tokens have sizes after the step: it merges, or its gate (in training) multiplies sizes."""
        part = self.parts.get(step.method.name)
        if part is not None and part.training:
            return True
        if step.method.adaptive:
            return True
        if step.merges:
            return step.keeps_sizes
        return not step.method.selects or step.rest != "drop"

    def tokens_to_keep(self, cut: Cut, n: int, first: int | None = None) -> int:
        """How many of n tokens are kept. first: tokens of the image before any cut; None: n."""
        keep = cut.count(n, first)
        if keep < 1:
            raise UserError(f"{cut.step} at layer {cut.name} leaves no token of {n}")
        if not cut.step.method.adaptive and (note := count_note(cut, n, first)) is not None:
            self.notes.warn(note)  # for images smaller than the configured size
        return keep

    def choose(self, cut: Cut, view: View, keep: int, images: Sequence[int] | None = None) -> Reduction:
        """The decision of the step's method, with its option `rest`. NaN would rank first, so it is an error.

        images: the number of each image in the batch, for messages; None: from 0 on.
        """
        checks = self.check_finite and not torch.compiler.is_compiling()
        if checks:
            _check_tokens(cut, view, images)
        chosen: Reduction = cut.step.method.decide(view, keep, **cut.step.arguments())
        if checks and chosen.scores is not None and not torch.isfinite(chosen.scores.sum(dtype=torch.float32)):
            bad = ~torch.isfinite(chosen.scores).all(1)
            if bad.any():
                raise NotFinite(
                    f"{cut.step}: its scores at layer {cut.name} contain NaN or infinity, {_name_images(bad, view, images)}"
                )
        reduction = apply_rest(view, chosen, cut.step.rest)
        options = cut.step.options
        return with_merge_options(view, reduction, options["norm"], options["sizes"]) if cut.step.merges else reduction

    def plan_work(self) -> AbstractContextManager[Any]:
        """Reports work of the plan to the observer."""
        return nullcontext() if self.observer is None else self.observer.plan_work()

    def model_work(self) -> AbstractContextManager[Any]:
        """Reports work of the model to the observer."""
        return nullcontext() if self.observer is None else self.observer.model_work()


def _check_tokens(cut: Cut, view: View, images: Sequence[int] | None) -> None:
    """Raises NotFinite if the tokens contain NaN or infinity, or values so large that distances would be infinite."""
    tokens = view.tokens.detach()
    if not tokens.numel():
        return
    low, high = tokens.aminmax()
    if torch.maximum(high, -low) <= LARGEST:  # False for NaN
        return
    bad, problem = ~torch.isfinite(tokens).flatten(1).all(1), "contain NaN or infinity"
    if not bad.any():
        bad, problem = (tokens.abs() > LARGEST).flatten(1).any(1), f"contain values above {LARGEST:g}"
    where = _name_images(bad, view, images)
    raise NotFinite(f"the tokens at layer {cut.name} {problem}, so they cannot be ranked: {where}")


def _name_images(bad: Tensor, view: View, images: Sequence[int] | None) -> str:
    """Which images of the batch are bad (B,), for a message."""
    rows: list[int] = bad.nonzero()[:, 0].tolist()
    if len(rows) == len(bad) > 1:
        return f"all {len(bad)} images of the batch; look at the weights of the model"
    modalities = tuple(view.context.get("modalities", ())) or ("",)
    n = len(bad) // len(modalities)  # a batch holds the images of one modality after another
    names = []
    for row in rows[:MAX_NAMED]:
        name = f"image {row % n if images is None else images[row]} of the batch"
        if modalities[0]:
            name += f" ({modalities[row // n]})"
        elif view.samples is not None:
            name += f" (number {int(view.samples[row])} of the run)"
        names.append(name)
    return ", ".join(names) + (f" and {len(rows) - MAX_NAMED} more" if len(rows) > MAX_NAMED else "")
