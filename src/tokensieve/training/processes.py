"""Learners in several processes: joining them, and averaging gradients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokensieve import distributed
from tokensieve.device import find_device
from tokensieve.errors import UserError


def start_accelerator(device: str | None, mixed_precision: str, accumulation_steps: int, key: str) -> Any:
    """The accelerator: processes, device and number format. key: the key of the device, for messages.

    mixed_precision auto: fp16 on CUDA, else none.
    """
    from accelerate import Accelerator  # type: ignore[import-untyped]

    launched = distributed.from_environment(os.environ)
    try:
        wanted = find_device(device, launched.local_rank)
    except UserError as error:
        raise UserError(f"{key}: {str(error).removeprefix('--device ')}") from None
    if device is not None and wanted.index is not None:
        if launched.size > 1:
            raise UserError(
                f"{key}: {device} would be used by all {launched.size} processes; write {wanted.type}, and each takes its own"
            )
        if wanted.type == "cuda":
            torch.cuda.set_device(wanted)  # the one that Accelerate uses
    on_cpu = wanted.type == "cpu"
    if mixed_precision == "auto":
        mixed_precision = "fp16" if wanted.type == "cuda" else "no"
    if mixed_precision == "fp16" and on_cpu:
        raise UserError("mixed_precision: fp16 needs a GPU; on a CPU use bf16 or no")
    return Accelerator(mixed_precision=mixed_precision, gradient_accumulation_steps=accumulation_steps, cpu=on_cpu)


def average(values: Sequence[Tensor], processes: int) -> None:
    """Replace each value, such as a gradient, by its mean over all processes, in one message."""
    if processes == 1 or not values:
        return
    import torch.distributed as dist

    flat = torch.cat([value.flatten() for value in values])
    with distributed.translate_gloo_errors():
        dist.all_reduce(flat)
    flat /= processes
    for value, mean in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(mean.view_as(value))
