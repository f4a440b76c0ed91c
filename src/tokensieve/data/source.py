"""A data set ready to be read: samples in batches, for one process or several, with unreadable samples counted.

Several processes share the batches. A batch has the same samples and the same number whichever process reads it.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info, random_split

from tokensieve.data.workers import WorkerLoader
from tokensieve.errors import UserError
from tokensieve.plugins import WithPlugins
from tokensieve.provenance import digest

Inputs = Any  # images: Tensor (B,3,h,w), or (B,n,3,h,w) with n a sample; or tensors by name, as a processor makes them
Templates = Sequence[str] | Mapping[str, Sequence[str]]


class Broken(NamedTuple):
    """Stands in for a sample that could not be read."""

    name: str
    reason: str
    fatal: bool = False  # what comes after it cannot be read either


class Batch(NamedTuple):
    """One batch of a loader: its readable samples, and a list of the others.

    images, targets: None if no sample is readable
    targets: (B,) or (B,C), or B lists of captions, or the second output of the source's `join`
    """

    images: Inputs | None
    targets: Any
    broken: list[Broken]
    number: int  # index of the batch in the order of a single process; some numbers may be missing
    samples: Tensor  # (B,) int64, the number of each sample, which does not depend on batches or processes


def stack_samples(images: Sequence[Tensor], targets: Sequence[Any]) -> tuple[Tensor, Any]:
    """Images (B,3,h,w) or (B,n,3,h,w), and labels (B,) or (B,C) or B lists of captions."""
    return torch.stack(list(images)), list(targets) if isinstance(targets[0], list) else default_collate(list(targets))


@dataclass
class Source:
    """A data set ready to be read. A sample is (image, label or list of captions), a pair that `join` takes, or Broken."""

    samples: Dataset[Any] | Stream
    classes: list[str]
    templates: Templates
    fingerprint: str
    most_workers: int | None = None  # more processes than this would be idle
    captions: bool = False
    join: Callable[[Sequence[Any], Sequence[Any]], tuple[Inputs, Any]] = stack_samples  # the samples of a batch as one
    notes: tuple[str, ...] = ()  # what is odd in the data, a sentence each
    names: Sequence[str] = ()  # of the samples by their numbers, where they have names, such as files

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    @property
    def size(self) -> int | None:
        """The number of samples; None for a stream."""
        return None if isinstance(self.samples, Stream) else len(self)

    def workers(self, wanted: int) -> int:
        """The number of reading processes, at most `wanted`."""
        return min(wanted, os.cpu_count() or 1, wanted if self.most_workers is None else self.most_workers)

    def loader(self, batch_size: int, num_workers: int, pin: bool = False, rank: int = 0, world: int = 1) -> DataLoader[Batch]:
        """The batches that process `rank` of `world` reads, in the order of the data set; for a stream, in that of its workers.

        Together the processes read every batch once. Each batch is one that a single process with as many workers would read.
        """
        batches: Dataset[Batch]
        if isinstance(self.samples, Stream):
            batches = _StreamBatches(self.samples, batch_size, rank, world, self.join)
        else:
            batches = _Batches(self.samples, batch_size, rank, world, self.join)
        return WorkerLoader(batches, num_workers=self.workers(num_workers), pin_memory=pin)

    def split(self, proportion: float, generator: torch.Generator) -> tuple[Source, Source]:
        """Two random subsets of the samples, drawn with torch's random_split; `proportion` is that of the second one."""
        if isinstance(self.samples, Stream):
            raise UserError(
                "a stream of shards has no length to take --val_proportion of: give --val_split with a split of it."
            )
        if not 0 < proportion < 1:
            raise UserError(f"--val_proportion {proportion}: it must be above 0 and below 1, such as 0.1.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an empty subset is an error here
            subsets: list[Any] = random_split(range(len(self)), [1 - proportion, proportion], generator)  # type: ignore[arg-type]
        if not all(map(len, subsets)):
            raise UserError(f"--val_proportion {proportion} of {len(self)} images leaves nothing to train or to validate on.")
        first, second = (
            replace(
                self,
                samples=Subset(self.samples, subset.indices),
                fingerprint=digest([self.fingerprint, list(subset.indices)]),
            )
            for subset in subsets
        )
        return first, second


def take_first(source: Source, limit: int | None) -> Source:
    """The first `limit` samples of a source; all of them if limit is None."""
    if limit is None:
        return source
    mark = digest([source.fingerprint, limit])
    if isinstance(source.samples, Stream):
        return replace(source, samples=FirstOfStream(source.samples, limit), most_workers=1, fingerprint=mark)
    return replace(source, samples=Subset(source.samples, range(min(limit, len(source)))), fingerprint=mark)


class Subset(Dataset[Any]):
    """Some samples of a data set. They keep their numbers in the data set."""

    def __init__(self, samples: Any, indices: Sequence[int]) -> None:
        inner = isinstance(samples, Subset)
        self.samples = samples.samples if inner else samples
        self.indices = [samples.indices[index] for index in indices] if inner else indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.samples[self.indices[index]]


class Stream:
    """Samples that are read one after another. Decoding is a separate step, so samples of other processes are not decoded."""

    def read_encoded(self) -> Iterator[tuple[int, Any]]:
        """The encoded samples of this worker, each with its number."""
        raise NotImplementedError

    def decode(self, sample: Any) -> Any:
        """The sample as (image tensor, target), or Broken."""
        raise NotImplementedError


class FirstOfStream(Stream):
    """The first samples of a stream, in the order of a single worker."""

    def __init__(self, stream: Stream, limit: int) -> None:
        self.stream, self.limit = stream, limit

    def read_encoded(self) -> Iterator[tuple[int, Any]]:
        return itertools.islice(self.stream.read_encoded(), self.limit)

    def decode(self, sample: Any) -> Any:
        return self.stream.decode(sample)


class _Batches(WithPlugins, Dataset[Batch]):
    """The batches of one process, from a data set with a length: of `world` batches in a row, it reads the one at `rank`."""

    def __init__(self, samples: Any, size: int, rank: int, world: int, join: Any) -> None:
        self.samples, self.size, self.join = samples, size, join
        self.numbers = range(rank, -(-len(samples) // size), world)
        self.names = samples.indices if isinstance(samples, Subset) else range(len(samples))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Batch:
        number = self.numbers[index]
        indices = range(number * self.size, min((number + 1) * self.size, len(self.samples)))
        names = [self.names[index] for index in indices]
        return collate([self.samples[index] for index in indices], number, names, self.join)


class _StreamBatches(WithPlugins, IterableDataset[Batch]):
    """The batches of one process, from a stream: of `world` batches of a worker in a row, it decodes the one at `rank` only.

    A DataLoader reads from its workers in turn, so (turn, worker) is the order in which a single process would get them.
    """

    def __init__(self, samples: Stream, size: int, rank: int, world: int, join: Any) -> None:
        self.samples, self.size, self.rank, self.world, self.join = samples, size, rank, world, join

    def __iter__(self) -> Iterator[Batch]:
        worker, workers = worker_number()
        encoded = self.samples.read_encoded()
        for turn in itertools.count():
            chunk = list(itertools.islice(encoded, self.size))
            if not chunk:
                return
            fatal = any(isinstance(sample, Broken) and sample.fatal for _, sample in chunk)  # every process must stop
            if turn % self.world == self.rank or fatal:
                names, samples = zip(*chunk, strict=True)
                decoded = [self.samples.decode(sample) for sample in samples]
                yield collate(decoded, turn * workers + worker, names, self.join)


def worker_number() -> tuple[int, int]:
    """The index of this reading process, and the number of them."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def collate(samples: Sequence[Any], number: int, names: Sequence[int], join: Any = stack_samples) -> Batch:
    """A batch of the readable samples, with a list of the others."""
    broken = [sample for sample in samples if isinstance(sample, Broken)]
    readable = [(name, *sample) for name, sample in zip(names, samples, strict=True) if not isinstance(sample, Broken)]
    if not readable:
        return Batch(None, None, broken, number, torch.empty(0, dtype=torch.int64))
    kept, images, targets = zip(*readable, strict=True)
    try:
        joined, labels = join(images, targets)
    except RuntimeError as error:  # torch's error for tensors that cannot be stacked
        reason = f"its images or its labels differ in shape ({error})"
        return Batch(None, None, [Broken("a batch", reason, fatal=True)], number, torch.empty(0, dtype=torch.int64))
    return Batch(joined, labels, broken, number, torch.tensor(kept))
