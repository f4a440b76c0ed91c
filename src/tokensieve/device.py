"""Devices: choosing one, waiting for it, timing on it, and moving inputs to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokensieve.errors import UserError


def find_device(name: str | None, local_rank: int = 0) -> torch.device:
    """The device of that name. Without a name: CUDA if there is one, else MPS, else the CPU."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name is None:
        return torch.device(f"cuda:{local_rank}" if cuda else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name!r} is not a device: use cpu, cuda, cuda:0, mps.") from error
    available = {"cpu": True, "cuda": cuda and (device.index or 0) < torch.cuda.device_count(), "mps": mps}
    if not available.get(device.type, False):
        raise UserError(f"--device {name}: this machine has {', '.join(d for d, ok in available.items() if ok)} only.")
    return device


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of the call, and the seconds it took."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def to_device(inputs: Any, device: torch.device) -> Any:
    """The inputs of a model, a tensor or tensors by name, on the device."""
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    return {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
