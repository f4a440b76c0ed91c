"""Counting floating-point operations, in GFLOPs (a multiply and an add are two)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def gflops(run: Callable[[], Any]) -> float:
    """GFLOPs of one call, counted by torch."""
    return gflops_within(run, None, None)[0]


def gflops_within(run: Callable[[], Any], model: nn.Module | None, module: nn.Module | None) -> tuple[float, float]:
    """GFLOPs of one call, and of the calls of one module of the model inside it.

    The fast path of nn.MultiheadAttention counts as 0 (open_clip's ViT-B-32 would have 5.9 instead of 8.8), so it is
    disabled while counting.
    """
    from torch.utils.flop_counter import FlopCounterMode

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    names = [] if model is None or module is None else [name for name, child in model.named_modules() if child is module]
    counts = counter.get_flop_counts()
    inside = sum(sum(counts.get(f"{type(model).__name__}.{name}", {}).values()) for name in names)
    return counter.get_total_flops() / 1e9, inside / 1e9
