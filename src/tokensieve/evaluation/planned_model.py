"""A model under one plan during an evaluation: the plan is applied for a batch, timed, and removed again."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokensieve.cutting.handle import Handle, apply
from tokensieve.data.source import Inputs
from tokensieve.device import timed as run_timed
from tokensieve.errors import PlanWarning, Uncuttable
from tokensieve.evaluation.token_fusion import fused_feature
from tokensieve.measuring.rounds import Ratio
from tokensieve.models.registry import open_tower
from tokensieve.parts import resolve
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan

Precision = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fusion:
    """What the image feature is made of: the model's own feature, or also the selected patches."""

    kind: str = "cls"
    weight: float = 0.8
    temperature: float = 1.0


class Timed(NamedTuple):
    """How long one batch took."""

    images: int
    seconds: float
    batch: int | None  # the number of its first sample, by which batches of two plans are paired


class PlannedModel:
    """A model under one plan: applies the plan for a batch, runs the task, removes the plan, and keeps the times."""

    def __init__(
        self,
        model: Any,
        plan: Plan,
        seed: int,
        precision: Precision,
        *,
        weights: Weights = None,
        fusion: Fusion = Fusion(),
        run: Callable[[Any, Inputs], Any] | None = None,
        run_for_flops: Callable[[Any, Inputs], Any] | None = None,
    ) -> None:
        self.model, self.plan, self.precision, self.fusion = model, plan, precision, fusion
        self._run, self._run_for_flops = run or self._feature, run_for_flops or self._feature
        self.handle: Handle | None = None
        self.reason: str | None = "the plan is none" if plan.is_identity else None
        self.times: list[Timed] = []  # of every batch
        self.has_cut = False  # at least one batch ran on fewer tokens
        self._notes: dict[str, None] = {}  # of other processes
        try:
            if fusion.kind != "cls":
                open_tower(model)
            if not plan.is_identity:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PlanWarning)  # its notes go to stderr and into the result
                    self.handle = apply(model, plan, seed=seed, weights=weights)
                self.handle.remove()
        except Uncuttable as error:
            self.reason, self.fusion = error.reason, Fusion()

    @property
    def is_unsupported(self) -> bool:
        """Whether the model cannot do what the plan or the fusion needs."""
        return self.reason is not None and not (self.plan.is_identity and self.reason == "the plan is none")

    @property
    def trained(self) -> str | None:
        """A fingerprint of the trained weights that its methods use."""
        return resolve.parts_fingerprint(self.handle.parts) if self.handle else None

    @property
    def key(self) -> str:
        """The plan, and which trained weights it uses."""
        return f"{self.plan} {self.trained}" if self.trained else str(self.plan)

    @property
    def notes(self) -> list[str]:
        """What the plan does not do on this model, or has not done with the images so far."""
        return list(dict.fromkeys([*(self.handle.notes if self.handle else []), *self._notes]))

    @property
    def unchanged_reason(self) -> str | None:
        """Why what was measured so far is the full model; None if it is not."""
        if self.handle is None:
            return self.reason if self.fusion.kind == "cls" else None
        if not self.has_cut:
            return "no token was removed from any image"
        if self.handle.leaves_feature and self.fusion.kind == "cls":
            return "the image feature is the CLS feature, which this plan does not change"
        return None

    @property
    def observed(self) -> tuple[bool, list[str]]:
        """What the batches of this process have shown of the plan, for `join`."""
        return self.has_cut, self.notes

    def join(self, observed: tuple[bool, list[str]]) -> None:
        """Adds what the batches of another process have shown."""
        has_cut, notes = observed
        self.has_cut |= has_cut
        self._notes |= dict.fromkeys(notes)

    def __call__(self, images: Inputs, samples: Tensor | None = None, timed: bool = True) -> Any:
        """What the task runs under the plan; by default the image features.

        samples (B,): the numbers of the samples; where each holds r images, the numbers of the images are made from them.
        Inputs by name need them. timed: whether the time counts for the plan's speed.
        """
        if isinstance(images, Tensor):
            count, device = len(images), images.device
        else:
            assert samples is not None
            count, device = len(samples), next(iter(images.values())).device
        run = partial(self._with_plan, self._run, images, _image_ids(samples, count))
        if not timed:
            return run()
        output, seconds = run_timed(run, device)
        self.times.append(Timed(count, seconds, None if samples is None or not len(samples) else int(samples[0])))
        return output

    def run_for_flops(self, sample: Inputs) -> Any:
        """What FLOPs are counted of, untimed; by default the image features."""
        return self._with_plan(self._run_for_flops, sample)

    def _feature(self, model: Any, images: Tensor) -> Tensor:
        fusion = self.fusion
        return fused_feature(model, images, self.handle, fusion.kind, fusion.weight, fusion.temperature)

    def _with_plan(self, run: Callable[[Any, Inputs], Any], images: Inputs, samples: Tensor | None = None) -> Any:
        with ExitStack() as stack:
            if self.handle is not None:
                stack.enter_context(self.handle)
                stack.enter_context(self.handle.call(samples=samples))
            stack.enter_context(self.precision())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", PlanWarning)  # as above
            output = run(self.model, images)
        if self.handle is not None:
            self.has_cut |= self.handle.has_cut
        return output

    @property
    def seconds(self) -> float:
        return sum(timed.seconds for timed in self.times)

    def images_per_second(self) -> float | None:
        """From the median time of an image over whole batches, the first one (warm-up) left out if there are more."""
        whole = [timed.seconds / timed.images for timed in self._whole_batches()]
        return 1 / statistics.median(whole[1:] or whole) if whole else None

    def speed_up(self, full: PlannedModel) -> tuple[Ratio, int] | None:
        """How much faster than the full model: the ratio within each whole batch, and of how many batches. The first one
        (warm-up) is left out if there are more. None: they were not timed on the same batches.
        """
        of_full = {timed.batch: timed.seconds for timed in full._whole_batches() if timed.batch is not None}
        pairs = [(of_full[timed.batch], timed.seconds) for timed in self._whole_batches() if timed.batch in of_full]
        pairs = pairs[1:] or pairs
        return (Ratio.of(*zip(*pairs, strict=True)), len(pairs)) if pairs else None

    def _whole_batches(self) -> list[Timed]:
        largest = max((timed.images for timed in self.times), default=0)
        return [timed for timed in self.times if timed.images == largest]


def _image_ids(samples: Tensor | None, images: int) -> Tensor | None:
    """Numbers of images from the numbers of samples with the same count of images each: (B,) -> (B r,)."""
    if samples is None or len(samples) == images:
        return samples
    each = images // len(samples)
    return (samples[:, None] * each + torch.arange(each)).flatten()
