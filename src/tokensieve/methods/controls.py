"""Controls: baselines that a method should beat at the same number of tokens, and the method that changes nothing."""

from __future__ import annotations

import functools
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


@functools.lru_cache(maxsize=512)
def _cached_cells(grid: tuple[int, int] | None, n: int, keep: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # they are used in later passes too, with gradients or without
        cell = cells(grid, n, keep)
        return cell.to(device), centres(grid, cell, keep).to(device)


def cells_and_centres(view: View, keep: int) -> tuple[Tensor, Tensor]:
    """The cell of each patch (B, N), and the patch in the middle of each cell (B, K). They do not depend on the image."""
    # A graph under construction holds no real tensors, which the cache must not keep.
    is_plain = type(view.tokens) is Tensor and not torch.compiler.is_compiling()
    find = _cached_cells if is_plain else _cached_cells.__wrapped__
    cell, middle = find(view.grid, view.n, keep, view.tokens.device)
    batch = view.tokens.shape[0]
    return cell.expand(batch, -1), middle.expand(batch, -1)


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
    return Reduction.keep(cells_and_centres(view, keep)[1], view.n)


@method(summary="neighbouring patches averaged: K compact cells", selects=False, norm=0.0, control=True)
def pool(view: View, keep: int) -> Reduction:
    """The size-weighted mean of each of K compact cells."""
    cell, middle = cells_and_centres(view, keep)
    return Reduction.merge(cell, middle, view.sizes_or_ones())
