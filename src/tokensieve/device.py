"""The device that a run works on: finding it, waiting for it, timing on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokensieve.errors import UserError


def find_device(name: str | None, local_rank: int = 0) -> torch.device:
    """The device of that name; without one, CUDA, then MPS, then the CPU."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name is None:
        return torch.device(f"cuda:{local_rank}" if cuda else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name!r} is not a device: use cpu, cuda, cuda:0, mps.") from error
    there = {"cpu": True, "cuda": cuda and (device.index or 0) < torch.cuda.device_count(), "mps": mps}
    if not there.get(device.type, False):
        raise UserError(f"--device {name}: this machine has {', '.join(d for d, ok in there.items() if ok)} only.")
    return device


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What the call returned, and its seconds."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def to_device(inputs: Any, device: torch.device) -> Any:
    """What a model takes, on the device."""
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    return {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
