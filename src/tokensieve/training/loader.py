"""Batches that are read ahead by workers, without a trace in what a checkpoint holds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


def read_ahead(batches: Dataset[Any], workers: int, each: int | None = None) -> Iterator[Any]:
    """The items of a data set whose items are batches, in their order. each: how many a worker has ready."""
    loader: DataLoader[Any] = DataLoader(
        batches,
        batch_size=None,
        num_workers=workers,
        worker_init_fn=leave_process_group,
        generator=torch.Generator(),  # its own, so that workers do not move the ones a checkpoint holds
        prefetch_factor=each if workers else None,
    )
    return iter(loader)


def leave_process_group(_worker: int) -> None:
    """Ctrl-C and `timeout` reach the whole process group; only the loop answers to them, so a worker leaves the group.

    It does not ignore SIGTERM: after a crash that is how Python ends its children, and it waits until they are gone.
    """
    if os.name == "posix":
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
