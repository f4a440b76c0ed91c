"""Batches that workers read ahead, without an effect on the state of checkpoints."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

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
    loader: DataLoader[Any] = DataLoader(
        _Items(batches),
        batch_size=None,
        num_workers=workers,
        worker_init_fn=leave_process_group,
        generator=torch.Generator(),  # its own, so that workers do not advance the global ones
        prefetch_factor=each if workers else None,
    )
    return iter(loader)


def leave_process_group(_worker: int) -> None:
    """Ctrl-C and `timeout` reach the whole process group; only the loop handles them, so a worker leaves the group.

    It does not ignore SIGTERM: after a crash Python ends its children by it and waits for them.
    """
    if os.name == "posix":
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
