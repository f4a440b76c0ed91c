"""Batches that workers read ahead, without an effect on the state of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, default_convert

from tokensieve.data.workers import WorkerLoader
from tokensieve.plugins import WithPlugins


class _Items(WithPlugins, Dataset[Any]):
    """The items of a data set, whose class may be a plug-in's."""

    def __init__(self, items: Dataset[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def read_ahead(batches: Dataset[Any], workers: int, each: int | None = None) -> Iterator[Any]:
    """The items, in order, of a data set of batches. each: how many a worker reads ahead."""
    loader = WorkerLoader(
        _Items(batches),
        default_convert,
        num_workers=workers,
        generator=torch.Generator(),  # its own, so that workers do not advance the global ones
        prefetch_factor=each if workers else None,
    )
    return iter(loader)
