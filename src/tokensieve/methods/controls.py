"""Controls: baselines that a method should beat at the same number of tokens, and the method that changes nothing."""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.places import floored_share
from tokensieve.methods.registry import method
from tokensieve.scoring import top


def cells(grid: tuple[int, ...] | None, n: int, keep: int) -> Tensor:
    """A partition of n patches in raster order into keep compact cells of nearly equal size: (N,) cell numbers.

    The rows are split into bands and each band into cells of neighbouring columns, as square as keep allows. A video is split
    into runs of frames first, as long as cells are high. Where the raster is no longer complete (grid is None) cells are runs
    of the sequence.
    """
    index = torch.arange(n)
    if grid is None:
        return index * keep // n
    if len(grid) == 3:
        made, first = [], 0
        for length, count in runs_of_frames(grid, keep):
            made.append((first + cells(grid[1:], grid[1] * grid[2], count)).repeat(length))
            first += count
        return torch.cat(made)
    h, w = grid
    fewest, most = math.ceil(keep / w), min(h, keep)  # bands
    bands = min(max(round(math.sqrt(keep * h / w)), fewest), most)
    band = (index // w) * bands // h  # (N,)
    start = band * keep // bands  # number of the band's first cell
    return start + (index % w) * ((band + 1) * keep // bands - start) // w


def runs_of_frames(grid: tuple[int, ...], keep: int) -> list[tuple[int, int]]:
    """The runs of frames of a video whose cells are alike: (frames, cells) of each."""
    frames, h, w = grid
    fewest, most = math.ceil(keep / (h * w)), min(frames, keep)
    runs = min(max(round((keep * frames**2 / (h * w)) ** (1 / 3)), fewest), most)
    parts = [(run * frames // runs, run * keep // runs) for run in range(runs + 1)]
    return [(stop - start, until - first) for (start, first), (stop, until) in itertools.pairwise(parts)]


def centres(grid: tuple[int, ...] | None, cell: Tensor, keep: int) -> Tensor:
    """The patch nearest to the middle of each cell: (K,). Of a video in the middle one of its frames."""
    if grid is not None and len(grid) == 3:
        size, start, first, found = grid[1] * grid[2], 0, 0, []
        for length, count in runs_of_frames(grid, keep):
            at = (start + length // 2) * size
            found.append(at + centres(grid[1:], cell[at : at + size] - first, count))
            start, first = start + length, first + count
        return torch.cat(found)
    n = len(cell)
    w = n if grid is None else grid[1]
    position = torch.stack([torch.arange(n) // w, torch.arange(n) % w], dim=1).float()  # (N, 2)
    member = torch.nn.functional.one_hot(cell, keep).float()  # (N, K)
    middle = (member.T @ position) / member.sum(0)[:, None]  # (K, 2)
    return torch.cdist(middle, position).masked_fill(member.T == 0, torch.inf).argmin(-1)


@functools.lru_cache(maxsize=512)
def _cached_cells(grid: tuple[int, ...] | None, n: int, keep: int, device: torch.device) -> tuple[Tensor, Tensor]:
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


@method(summary="patches evenly spread over the image (of a video, over space and time), the same for each image", control=True)
def grid(view: View, keep: int) -> Reduction:
    """The middle patch of each of K compact cells."""
    return Reduction.keep(cells_and_centres(view, keep)[1], view.n)


@method(
    summary="of a video, every n-th frame: whole frames, evenly spread over time",
    control=True,
    adaptive=True,
    budget=lambda options: "50%",
    count=floored_share,
    where=lambda depth, decoder: "llm.0" if decoder else "out",
)
def frames(view: View, keep: int) -> Reduction:
    """As many frames as fit into the budget, one at least: the middle one of each of so many runs. An image is one frame."""
    total, h, w = view.video_grid()
    count = max(1, keep // (h * w))
    middle = (2 * torch.arange(count, device=view.tokens.device) + 1) * total // (2 * count)
    chosen = torch.zeros((total, h * w), dtype=torch.bool, device=view.tokens.device).index_fill(0, middle, True)
    return Reduction.keep_some(chosen.flatten().expand(len(view.tokens), -1), view.sizes)


@method(summary="neighbouring patches averaged: K compact cells", selects=False, norm=0.0, control=True)
def pool(view: View, keep: int) -> Reduction:
    """The size-weighted mean of each of K compact cells."""
    cell, middle = cells_and_centres(view, keep)
    return Reduction.merge(cell, middle, view.sizes_or_ones())
