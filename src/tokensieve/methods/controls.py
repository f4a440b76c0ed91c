"""Controls: baselines that a method should beat at the same number of tokens, and the method that changes nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.scoring import top


def cells(grid: tuple[int, int] | None, n: int, keep: int) -> Tensor:
    """A partition of n patches in raster order into keep compact cells of nearly equal size: (N,) cell numbers.

    The rows are split into bands and each band into cells of neighbouring columns, as square as keep allows. Where the
    raster is no longer complete (grid is None) cells are runs of the sequence.
    """
    index = torch.arange(n)
    if grid is None:
        return index * keep // n
    h, w = grid
    fewest, most = math.ceil(keep / w), min(h, keep)  # bands
    bands = min(max(round(math.sqrt(keep * h / w)), fewest), most)
    band = (index // w) * bands // h  # (N,)
    start = band * keep // bands  # number of the band's first cell
    return start + (index % w) * ((band + 1) * keep // bands - start) // w


def centres(grid: tuple[int, int] | None, cell: Tensor, keep: int) -> Tensor:
    """The patch nearest to the middle of each cell: (K,)."""
    n = len(cell)
    w = n if grid is None else grid[1]
    position = torch.stack([torch.arange(n) // w, torch.arange(n) % w], dim=1).float()  # (N, 2)
    member = torch.nn.functional.one_hot(cell, keep).float()  # (N, K)
    middle = (member.T @ position) / member.sum(0)[:, None]  # (K, 2)
    return torch.cdist(middle, position).masked_fill(member.T == 0, torch.inf).argmin(-1)


@method(summary="keeps every token: the unchanged model", selects=False)
def none(view: View, keep: int) -> Reduction:
    """Everything, in order."""
    everything = torch.arange(view.n, device=view.tokens.device).expand(view.tokens.shape[0], -1)
    return Reduction.keep(everything, view.n)


@method(summary="random patches, different for each image", control=True)
def random(view: View, keep: int) -> Reduction:
    """The patches with the largest random numbers. The choice for an image does not depend on its batch."""
    return Reduction.keep(top(view.noise(), keep), view.n)


@method(summary="patches evenly spread over the image, the same ones for each image", control=True)
def grid(view: View, keep: int) -> Reduction:
    """The middle patch of each of K compact cells."""
    chosen = centres(view.grid, cells(view.grid, view.n, keep), keep).to(view.tokens.device)
    return Reduction.keep(chosen.expand(view.tokens.shape[0], -1), view.n)


@method(summary="neighbouring patches averaged: K compact cells", selects=False, norm=0.0, control=True)
def pool(view: View, keep: int) -> Reduction:
    """The size-weighted mean of each of K compact cells."""
    cell = cells(view.grid, view.n, keep)
    middle = centres(view.grid, cell, keep).to(view.tokens.device)
    batch = view.tokens.shape[0]
    return Reduction.merge(cell.to(view.tokens.device).expand(batch, -1), middle.expand(batch, -1), view.sizes_or_ones())
