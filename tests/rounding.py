"""Comparisons that hold whatever kernels a CPU has: tolerances come from the size of the numbers, choices from scores."""

from __future__ import annotations

import torch
from torch import Tensor


def tolerance(got: Tensor, wanted: Tensor, steps: float) -> float:
    """`steps` roundings of the largest number, in the coarser of the two types."""
    eps = max(torch.finfo(x.dtype).eps for x in (got, wanted))
    return steps * eps * max(float(wanted.abs().max()) if wanted.numel() else 0.0, torch.finfo(torch.float32).tiny)


def assert_near(got: Tensor, wanted: Tensor, steps: float = 300, msg: str | None = None) -> None:
    """The same numbers up to rounding. wanted: best computed in float64.

    Sums of products differ between kernels by some roundings of their largest term, so that small entries are as far off as
    large ones: what counts is the largest number of all. 300 steps of float32 are 4e-5 of it.
    """
    torch.testing.assert_close(
        got,
        wanted.to(got.device),
        rtol=0,
        atol=tolerance(got, wanted, steps),
        check_dtype=False,
        msg=msg and (lambda m: f"{msg}: {m}"),
    )


def assert_best(index: Tensor, scores: Tensor, steps: float = 300) -> None:
    """The choice (B, K), in raster order, holds the best K by these scores (B, N); which of two near ties is open."""
    assert (index.diff(dim=-1) > 0).all(), "not in raster order, or chosen twice"
    chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter(1, index, True)
    worst = scores.masked_fill(~chosen, torch.inf).amin(-1)
    missed = scores.masked_fill(chosen, -torch.inf).amax(-1)
    eps = torch.finfo(torch.float32).eps  # methods score in float32
    assert (worst >= missed - steps * eps * scores.abs().amax(-1)).all(), (index.tolist(), scores.tolist())
