"""Smaller images for a tower, inside the tower: the user passes the images as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Resize

Size = tuple[int, int]  # (h, w), in pixels or in patches
SizeRule = Callable[[Size, Size], Resize]  # size of an image, size of its patches -> the size at which the tower sees it


@dataclass(frozen=True)
class Resizing:
    """What a tower needs to make images smaller."""

    to: Resize  # for images of the configured size
    decide: SizeRule  # for images of any size
    set_full_grid: Callable[[Size], None]  # called with the first image's grid before resizing, if images have any size


def resize_images(images: Tensor, to: Resize) -> Tensor:
    """Images (B, C, H, W) at another size (h, w), by bicubic interpolation."""
    if images.shape[-2:] == to.size:
        return images
    return F.interpolate(images.float(), to.size, mode="bicubic", antialias=to.antialias).to(images.dtype)


def resize_positions(table: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """Position embeddings (N, D) of a grid (h, w), for another grid: bicubic, antialiased, as open_clip does it."""
    square = table.float().T.reshape(1, table.shape[1], *grid)  # (1, D, h, w)
    return F.interpolate(square, new_grid, mode="bicubic", antialias=True).flatten(2)[0].T.to(table.dtype)
