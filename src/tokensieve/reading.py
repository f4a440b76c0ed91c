"""The way of the data in an evaluation: batches to the device, broken images counted, progress shown."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tokensieve.data.sources import Batch, Broken, Inputs, Source
from tokensieve.distributed import World
from tokensieve.errors import UserError


class Reading:
    """One pass of one process over its part of the data."""

    def __init__(self, source: Source, data: str, max_broken: float, world: World) -> None:
        self.source, self.data, self.max_broken, self.world = source, data, max_broken, world
        self.broken: list[Broken] = []
        self.n_samples = 0

    def batches(self, batch_size: int, num_workers: int, device: torch.device, title: str | None) -> Iterator[Batch]:
        """Every batch of this process that holds an image, images on the device; progress under the title."""
        rank, size = self.world.rank, self.world.size
        loader = self.source.loader(batch_size, num_workers, pin=device.type == "cuda", rank=rank, world=size)
        total = None if self.source.size is None else self.source.size / size
        with tqdm(total=total, desc=title, unit="img", disable=title is None) as progress:
            for batch in loader:
                self._count(batch, progress)
                if batch.images is None:
                    progress.update(len(batch.broken))
                    continue
                yield batch._replace(images=moved(batch.images, device))
                progress.update(len(batch.broken) + len(batch.samples))

    def _count(self, batch: Batch, progress: Any) -> None:
        """Count what can be read and what cannot; an error that ends the pass begins on a line of its own."""
        for sample in batch.broken:
            if sample.fatal:
                progress.close()
                raise UserError(f"cannot read {sample.name} of {self.data}: {sample.reason}. Fetch it again.")
        self.broken += batch.broken
        self.n_samples += 0 if batch.images is None else len(batch.samples)
        if self.source.size is not None and len(self.broken) > self.max_broken * self.source.size:
            progress.close()
            judge(self.broken, self.n_samples, self.source.size, self.max_broken, self.data)


def moved(inputs: Inputs, device: torch.device) -> Inputs:
    """What a model takes, on the device."""
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    return {name: value.to(device, non_blocking=True) for name, value in inputs.items()}


def judge(broken: Sequence[Broken], n_samples: int, total: int, max_broken: float, data: str) -> None:
    """Name the broken images; a UserError if they are too many, or if nothing is left."""
    for sample in broken[:10]:
        print(f"tokensieve: cannot read {sample.name}: {sample.reason}", file=sys.stderr)
    if len(broken) > 10:
        print(f"tokensieve: ... and {len(broken) - 10} more", file=sys.stderr)
    if len(broken) > max_broken * total:
        raise UserError(
            f"at least {len(broken)} of {total} images of {data} cannot be read, more than "
            f"--max_broken {max_broken} allows: mend or remove them, or raise --max_broken."
        )
    if n_samples == 0:
        raise UserError(f"the data set {data} {'has no image that can be read' if broken else 'is empty'}.")
