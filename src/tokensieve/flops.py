"""Counting floating-point operations, in GFLOPs (a multiply and an add are two)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def gflops(run: Callable[[], Any]) -> float:
    """GFLOPs of one call, by torch's counter.

    The fast path of nn.MultiheadAttention counts as 0 (open_clip's ViT-B-32 would show 5.9 instead of 8.8), so it is
    off while counting.
    """
    from torch.utils.flop_counter import FlopCounterMode

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() / 1e9
