"""Golden numbers of released code: reading them, and comparing with them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.support.paths import ROOT

CASES = ("rand", "clus")
Arrays = dict[str, Tensor]


def read(name: str) -> Arrays:
    """The arrays of a file: float32 and int64."""
    with np.load(ROOT / "tests" / "parity" / f"{name}.npz") as arrays:
        tensors = {key: torch.from_numpy(np.asarray(arrays[key])) for key in arrays.files}
    return {key: value.float() if value.is_floating_point() else value.long() for key, value in tensors.items()}


def assert_golden(values: Tensor, golden: Tensor) -> None:
    torch.testing.assert_close(values, golden, rtol=0, atol=1e-4 * max(1.0, float(golden.abs().max())))


def assert_same_partition(groups: Tensor, golden: Tensor) -> None:
    """Groups (B, N) join the same tokens, whatever their numbers are."""
    assert torch.equal(groups[:, :, None] == groups[:, None], golden[:, :, None] == golden[:, None])
