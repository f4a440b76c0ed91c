"""Peak memory of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_memory(call: Callable[[], Any], device: torch.device) -> float | None:
    """The peak memory of tensors allocated during the call, in MiB (without weights and input); None if unknown."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    if device.type != "cpu":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak / 2**20
