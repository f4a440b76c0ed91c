"""What counts as time, and whether other programs disturb it.

On the CPU with one thread the CPU time of this process counts: other programs hardly change it. With several threads it would
be the sum of all of them, and on other devices it is not what is waited for; there wall time counts.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tokensieve.device import synchronize

BUSY = 1.2  # wall time for each second of CPU time, above which the machine is called busy
SHARED = 0.5  # of a CPU: what the load average may be above their number


class Seconds(NamedTuple):
    """The time of one call."""

    wall: float
    cpu: float  # of this process, all threads

    def counted(self, device: torch.device) -> float:
        """The time that counts on a device."""
        return self.cpu if counts_cpu_time(device) else self.wall


def counts_cpu_time(device: torch.device) -> bool:
    """Whether CPU time counts, not wall time."""
    return device.type == "cpu" and torch.get_num_threads() == 1


def read_clock(device: torch.device) -> float:
    """The clock that counts on a device, in seconds."""
    if counts_cpu_time(device):
        return time.process_time()
    synchronize(device)
    return time.perf_counter()


def watch(call: Callable[[], Any], device: torch.device) -> Seconds:
    """The time of a call."""
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    synchronize(device)
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


@contextmanager
def torch_threads(count: int | None, device: torch.device) -> Iterator[None]:
    """So many threads of torch inside the `with` block; None: one on the CPU, as many as there are elsewhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or (1 if device.type == "cpu" else before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_machine(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The machine that rows were measured on: CPUs, threads, load, and a warning if other programs disturbed it.

    rows: with `clock`, and medians of wall time and of the time that counts: `wall_seconds`, `seconds` (or its `total`).
    """
    cpus = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # not on Windows
    ratios = [row["wall_seconds"] / _total(row["seconds"]) for row in rows if row["clock"] == "cpu"]
    ratio = statistics.median(ratios) if ratios else None
    reason = None
    if ratio is not None and ratio > BUSY:
        reason = f"wall time is {ratio:.1f} times CPU time"
    elif load is not None and load > cpus + SHARED:
        reason = f"the load average is {load:.1f} on {cpus} CPUs"
    return {
        "cpus": cpus,
        "threads": torch.get_num_threads(),
        "load": load,
        "wall_per_cpu_second": ratio,
        "warning": None if reason is None else f"the machine is busy: {reason}; compare ratios only",
    }


def _total(seconds: float | Mapping[str, float]) -> float:
    return seconds["total"] if isinstance(seconds, Mapping) else seconds
