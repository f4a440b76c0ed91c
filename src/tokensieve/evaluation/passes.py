"""One pass over one split: every batch under every plan, broken images counted, progress shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokensieve.data.source import Batch, Broken, Inputs, Source
from tokensieve.device import to_device
from tokensieve.distributed import Processes
from tokensieve.errors import UserError, short
from tokensieve.evaluation.jobs import Job
from tokensieve.evaluation.planned_model import PlannedModel
from tokensieve.tasks.base import Record, Task
from tokensieve.terminal import progress

FULL_SHARE = 0.05  # of the plans' time may be spent on timing the full model, after one batch, where it is not among the plans

NO_SAMPLES = torch.empty(0, dtype=torch.int64)


@dataclass
class PassResult:
    """What a pass over one split gave, of all processes."""

    records: dict[str, list[Record]]  # by the plan's text
    samples: Tensor  # (n,) int64, the numbers of the samples
    broken: list[Broken]


def run_pass(
    split: str,
    source: Source,
    task: Task,
    models: Sequence[PlannedModel],
    full: PlannedModel,
    job: Job,
    args: argparse.Namespace,
    device: torch.device,
    show: bool,
    processes: Processes,
) -> PassResult:
    """Run every batch under every plan, each time starting with another one. Process 0 gets the records of all, in order."""
    if not models:
        return PassResult({}, NO_SAMPLES, [])
    reading = DataPass(source, f"{job.dataset} ({split})" if split != "test" else job.dataset, args.max_broken, processes)
    title = f"{job.model} on {reading.data}" if show else None
    batches = reading.batches(args.batch_size, args.num_workers, device, title)
    mine: list[tuple[int, list[int], list[Record]]] = []
    try:
        with torch.inference_mode():
            for turn, batch in enumerate(batches if full in models else _timing_full(batches, full, models, task)):
                order = [(turn + n) % len(models) for n in range(len(models))]  # no plan always runs with a cold cache
                encoders = [partial(models[index], samples=batch.samples) for index in order]
                records_of_batch = task.batch(split, batch.images, batch.targets, encoders)
                of_models = [records_of_batch[order.index(index)] for index in range(len(models))]
                mine.append((batch.number, batch.samples.tolist(), of_models))
    except torch.OutOfMemoryError as error:
        raise UserError(f"{device} has too little memory for --batch_size {args.batch_size}: try a smaller one.") from error
    gathered = processes.gather((mine, reading.n_samples, reading.broken, [model.observed for model in models]))
    if gathered is None:
        return PassResult({}, NO_SAMPLES, [])
    for *_, observed in gathered:
        for model, of_process in zip(models, observed, strict=True):
            model.join(of_process)
    n_samples, broken = sum(n for _, n, *_ in gathered), [sample for _, _, samples, _ in gathered for sample in samples]
    check_broken_share(broken, n_samples, n_samples + len(broken), args.max_broken, reading.data)
    ordered = sorted((entry for entries, *_ in gathered for entry in entries), key=lambda entry: entry[0])
    records = {str(model.plan): [batch[index] for _, _, batch in ordered] for index, model in enumerate(models)}
    return PassResult(records, torch.tensor([number for _, samples, _ in ordered for number in samples]), broken)


def _timing_full(batches: Iterator[Batch], full: PlannedModel, models: Sequence[PlannedModel], task: Task) -> Iterator[Batch]:
    """The same batches. A few of them also go through the full model, to time it."""
    for batch in batches:
        yield batch
        if full.seconds <= FULL_SHARE * sum(model.seconds for model in models):
            full(_flatten_images(task.timed_inputs(batch.images)), samples=batch.samples)


def _flatten_images(inputs: Inputs) -> Inputs:
    """Images (B,n,3,h,w) as (B n,3,h,w); other inputs as they are."""
    return inputs.flatten(0, -4) if isinstance(inputs, Tensor) else inputs


def first_sample(data: dict[str, Source], device: torch.device) -> Inputs:
    """The first image (1,3,h,w), or the inputs by name of the first sample, to count FLOPs with."""
    source = next(iter(data.values()))
    found = _flatten_images(next(batch.images for batch in source.loader(1, 0) if batch.images is not None))
    return to_device(found[:1] if isinstance(found, Tensor) else found, device)


class DataPass:
    """One pass of one process over its part of the data."""

    def __init__(self, source: Source, data: str, max_broken: float, world: Processes) -> None:
        self.source, self.data, self.max_broken, self.world = source, data, max_broken, world
        self.broken: list[Broken] = []
        self.n_samples = 0

    def batches(self, batch_size: int, num_workers: int, device: torch.device, title: str | None) -> Iterator[Batch]:
        """Every batch of this process that holds an image, with its images on the device; progress under the title."""
        rank, size = self.world.rank, self.world.size
        loader = self.source.loader(batch_size, num_workers, pin=device.type == "cuda", rank=rank, world=size)
        total = None if self.source.size is None else self.source.size / size
        with progress.bar(total=total, desc=title, unit="img", quiet=title is None) as bar:
            for batch in loader:
                self._count(batch, bar)
                if batch.images is None:
                    bar.update(len(batch.broken))
                    continue
                yield batch._replace(images=to_device(batch.images, device))
                bar.update(len(batch.broken) + len(batch.samples))

    def _count(self, batch: Batch, bar: Any) -> None:
        """Count readable and broken samples; an error that ends the pass starts on a line of its own."""
        for sample in batch.broken:
            if sample.fatal:
                bar.close()
                raise UserError(f"cannot read {short(sample.name, 200)} of {self.data}: {sample.reason}.")
        self.broken += batch.broken
        self.n_samples += 0 if batch.images is None else len(batch.samples)
        if self.source.size is not None and len(self.broken) > self.max_broken * self.source.size:
            bar.close()
            check_broken_share(self.broken, self.n_samples, self.source.size, self.max_broken, self.data)


def check_broken_share(broken: Sequence[Broken], n_samples: int, total: int, max_broken: float, data: str) -> None:
    """Print the broken images; a UserError if they are too many, or if none is left."""
    for sample in broken[:10]:
        print(f"tokensieve: cannot read {short(sample.name, 200)}: {short(sample.reason, 300)}", file=sys.stderr)
    if len(broken) > 10:
        print(f"tokensieve: ... and {len(broken) - 10} more", file=sys.stderr)
    if len(broken) > max_broken * total:
        raise UserError(
            f"at least {len(broken)} of {total} images of {data} cannot be read, more than "
            f"--max_broken {max_broken} allows: repair or remove them, or raise --max_broken."
        )
    if n_samples == 0:
        raise UserError(f"the data set {data} {'has no image that can be read' if broken else 'is empty'}.")
