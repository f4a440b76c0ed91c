"""Running plans on the images of a subject: distances to the full model, operations, and times in interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokensieve.cutting.handle import Handle
from tokensieve.data.source import Inputs
from tokensieve.device import to_device
from tokensieve.measuring.flops import gflops
from tokensieve.measuring.oracle import oracle
from tokensieve.measuring.rounds import Ratio, Variant, detached_handle, interleaved
from tokensieve.plan import Plan
from tokensieve.tuning.subject import Subject

TIMED_SECONDS = 1.5  # a batch for timing is made smaller until the full model takes less
LEAST_TIMED = 2  # images


class Evaluator:
    """A model on its device, its images in batches, and the outputs of the full model, which are computed once."""

    def __init__(self, subject: Subject, device: torch.device, batch_size: int, seed: int) -> None:
        self.subject, self.device, self.batch_size, self.seed = subject, device, batch_size, seed
        self.model: Any = subject.loaded.model
        self.sample: Inputs = self._to_device(subject.batch(0, 1))
        self.full = torch.empty(0)  # (N, F), of the images so far
        self._batches: dict[tuple[int, int], Inputs] = {}
        self._timed: Inputs | None = None
        self.timed_images = 0

    def _to_device(self, inputs: Inputs) -> Inputs:
        return to_device(inputs, self.device)

    def handle(self, plan: Plan) -> Handle:
        """The plan for this model, not attached; a UserError if it does not fit."""
        return detached_handle(self.model, plan, seed=self.seed)

    def seconds_per_image(self) -> float:
        """Of the full model, from one batch after a warm-up."""
        n = min(self.batch_size, len(self.subject.images))
        inputs = self.batch(0, n)
        self.outputs(None, [(0, min(n, 2))])
        start = time.perf_counter()
        self._run(None, inputs, 0, n)
        return (time.perf_counter() - start) / n

    def compute_full(self, n: int, progress: Callable[[int], Any] = lambda done: None) -> None:
        """Computes the outputs of the full model for the first n images, as far as they are not there."""
        ranges = [(a, b) for a, b in self.ranges(n) if b > len(self.full)]
        if ranges:
            done = [self.full[: ranges[0][0]]] if len(self.full) else []
            self.full = torch.cat([*done, self.outputs(None, ranges, progress)])

    def measures(self, plan: Plan, n: int) -> tuple[dict[str, Tensor], Handle]:
        """Every measure of the first n images (n,), and the handle with the ledger of the last batch."""
        handle = self.handle(plan)
        reduced = self.outputs(handle, self.ranges(n))
        return self.subject.compare(self.full[:n], reduced), handle

    def gflops(self, plan: Plan) -> float:
        """GFLOPs of one image, the method's own included."""
        handle = self.handle(plan)
        with handle:
            return gflops(lambda: self.subject.run(self.model, self.sample))

    def outputs(
        self, handle: Handle | None, ranges: Sequence[tuple[int, int]], progress: Callable[[int], Any] = lambda done: None
    ) -> Tensor:
        """What the subject compares, of these ranges of images: (N, F), float32, on the CPU."""
        made = []
        for start, stop in ranges:
            made.append(self._run(handle, self.batch(start, stop), start, stop).float().cpu())
            progress(stop - start)
        return torch.cat(made)

    def speedups(self, plans: Sequence[Plan], rounds: int, with_oracle: bool = True) -> list[dict[str, float]]:
        """Of every plan: seconds of the batch, speed-up over the full model, and of its oracle, in interleaved rounds."""
        inputs, n = self._timing_batch()
        handles = [self.handle(plan) for plan in plans]
        for handle in handles:
            self._run(handle, inputs, 0, n)
        oracles = [self.handle(oracle(handle)) for handle in handles] if with_oracle else []
        variants = [Variant(self._call(handle, inputs, n)) for handle in (None, *handles, *oracles)]
        for variant in variants:  # warm-up
            variant.run()
        times = interleaved(variants, self.device, range(rounds))
        full, *seconds = ([each.counted(self.device) for each in series] for series in times)
        rows = []
        for number in range(len(plans)):
            row = {"seconds": _median(seconds[number]), "speedup": Ratio.of(full, seconds[number]).median}
            row["seconds_full"] = _median(full)
            if with_oracle:
                row["speedup_oracle"] = Ratio.of(full, seconds[len(plans) + number]).median
            rows.append(row)
        return rows

    def _timing_batch(self) -> tuple[Inputs, int]:
        if self._timed is None:
            n = min(self.batch_size, len(self.subject.images))
            inputs = self.batch(0, n)
            while n > LEAST_TIMED:
                start = time.perf_counter()
                self._run(None, inputs, 0, n)
                if time.perf_counter() - start < TIMED_SECONDS:
                    break
                n = max(LEAST_TIMED, n // 2)
                inputs = self.subject.batch(0, n)
            self._timed, self.timed_images = self._to_device(inputs), n
        return self._timed, self.timed_images

    def _call(self, handle: Handle | None, inputs: Inputs, n: int) -> Callable[[], Any]:
        return lambda: self._run(handle, inputs, 0, n)

    def _run(self, handle: Handle | None, inputs: Inputs, start: int, stop: int) -> Tensor:
        inputs = self._to_device(inputs)
        with torch.inference_mode():
            if handle is None:
                return self.subject.run(self.model, inputs)
            with handle, handle.call(samples=torch.arange(start, stop)):
                return self.subject.run(self.model, inputs)

    def ranges(self, n: int) -> list[tuple[int, int]]:
        """The batches of the first n images; only the last may be smaller."""
        return [(start, min(n, start + self.batch_size)) for start in range(0, n, self.batch_size)]

    def batch(self, start: int, stop: int) -> Inputs:
        """Images are read and transformed once and kept on the CPU."""
        if (start, stop) not in self._batches:
            self._batches[start, stop] = self.subject.batch(start, stop)
        return self._batches[start, stop]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
