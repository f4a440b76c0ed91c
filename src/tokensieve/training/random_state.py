"""The state of the global random generators, saved in checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def generators() -> dict[str, Any]:
    """The state of the global generators: torch (CPU and CUDA), numpy, Python."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype("int64")), int(position), int(has_gauss), float(cached)),
        "python": random.getstate(),
    }


def restore_generators(state: dict[str, Any]) -> None:
    """Restore the global generators to a state of `generators`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    random.setstate(state["python"])
