"""SigLIP2's batches: flat patches of images of any shape, padded to one length, with the shape of each image's grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace as changed
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from tokensieve.core import Resize
from tokensieve.models.patching import Patch, replace
from tokensieve.models.resizing import Resizing, Size, SizeRule, resize_images
from tokensieve.models.tower import Layout, Undo


def to_patches(images: Tensor, size: int) -> Tensor:
    """(B, 3, H, W) -> (B, N, size * size * 3), patches in raster order."""
    batch, channels, height, width = images.shape
    cells = images.reshape(batch, channels, height // size, size, width // size, size).permute(0, 2, 4, 3, 5, 1)
    return cells.reshape(batch, -1, size * size * channels)  # from (B, h, w, size, size, 3)


def to_images(patches: Tensor, grid: Size, size: int) -> Tensor:
    """(B, N, size * size * 3) -> (B, 3, H, W): `to_patches` undone."""
    (h, w), batch = grid, patches.shape[0]
    cells = patches.reshape(batch, h, w, size, size, -1).permute(0, 5, 1, 3, 2, 4)  # (B, 3, h, size, w, size)
    return cells.reshape(batch, -1, h * size, w * size)


def batch_of(images: Tensor, size: int) -> dict[str, Tensor | None]:
    """Whole images of one size (B, 3, H, W) as the model takes them."""
    grid = [side // size for side in images.shape[-2:]]
    shapes = torch.tensor([grid], device=images.device).expand(len(images), -1)
    return {"pixel_values": to_patches(images, size), "pixel_attention_mask": None, "spatial_shapes": shapes}


def fit_grid(grid: Size, most: int) -> Size:
    """The largest grid of this shape with at most so many patches, by the rule of SigLIP2's image processor.

    Both sides are scaled alike and rounded up, by the largest scale (here: at most 1) at which the patches are not too many.
    """
    scales = {Fraction(k, side) for side in grid for k in range(1, side + 1)}  # rounding up changes a side at these only
    fitted = ((math.ceil(grid[0] * scale), math.ceil(grid[1] * scale)) for scale in sorted(scales, reverse=True))
    return next((h, w) for h, w in fitted if h * w <= most)


def resize(net: Any, resizing: Resizing) -> list[Undo]:
    """Has the tower see smaller images. Its own code interpolates position embeddings to each image's grid."""
    patch = int(net.config.patch_size)

    def forward(
        stock: Callable[..., Any],
        pixel_values: Tensor,
        pixel_attention_mask: Any = None,
        spatial_shapes: Any = None,
        **kwargs: Any,
    ) -> Any:
        grids = [(int(h), int(w)) for h, w in spatial_shapes.tolist()]
        sizes = {grid: _smaller(grid, patch, resizing.decide) for grid in grids}
        resizing.set_full_grid(grids[0])
        if any(sizes[h, w].size != (h * patch, w * patch) for h, w in sizes):
            pixel_values, spatial_shapes = _resize_batch(pixel_values, grids, sizes, patch)
            if pixel_attention_mask is not None:
                order = torch.arange(pixel_values.shape[1], device=spatial_shapes.device)
                real = order < spatial_shapes.prod(1)[:, None]
                pixel_attention_mask = real.to(pixel_attention_mask.device, pixel_attention_mask.dtype)
        return stock(pixel_values, pixel_attention_mask, spatial_shapes, **kwargs)

    return [replace(net, "forward", forward)]


def _smaller(grid: Size, patch: int, decide: SizeRule) -> Resize:
    """The size of an image with this grid: as many patches as the plan wants, shaped by the processor's rule."""
    to = decide((grid[0] * patch, grid[1] * patch), (patch, patch))
    h, w = fit_grid(grid, (to.size[0] // patch) * (to.size[1] // patch))
    return changed(to, size=(h * patch, w * patch))


def _resize_batch(pixels: Tensor, grids: list[Size], sizes: dict[Size, Resize], patch: int) -> tuple[Tensor, Tensor]:
    """The batch with smaller images, padded to the longest of them, and the shapes of their grids."""
    made = {grid: (to.size[0] // patch, to.size[1] // patch) for grid, to in sizes.items()}
    longest = max(h * w for h, w in made.values())
    smaller = pixels.new_zeros((len(grids), longest, pixels.shape[2]))
    for (h, w), to in sizes.items():
        rows = torch.tensor([row for row, grid in enumerate(grids) if grid == (h, w)], device=pixels.device)
        patches = to_patches(resize_images(to_images(pixels[rows, : h * w], (h, w), patch), to), patch)
        smaller[rows, : patches.shape[1]] = patches
    return smaller, torch.tensor([made[grid] for grid in grids], device=pixels.device)


def watch_shapes(net: Any, set_layout: Callable[[Layout], None]) -> list[Undo]:
    """The layout of a batch by the shapes of its grids. The head's mask goes where padding was taken off before."""

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes = kwargs["spatial_shapes"] if "spatial_shapes" in kwargs else args[1]
        grids = [(int(h), int(w)) for h, w in shapes.tolist()]
        reason = ""
        if len(set(grids)) > 1:
            shown = ", ".join(f"{h} x {w}" for h, w in sorted(set(grids))[:4])
            reason = (
                f"the images of this batch have different grids of patches ({shown}), and a plan cuts one grid; "
                "put images with the same grid into a batch"
            )
        h, w = grids[0]
        set_layout(Layout((h, w), h * w, reason))

    def unmask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if mask is None or mask.shape[1] == args[0].shape[1]:
            return None
        return args[:1], {name: value for name, value in kwargs.items() if name != "attention_mask"}

    undo = [net.embeddings.register_forward_pre_hook(Patch(look), with_kwargs=True).remove]
    if getattr(net, "head", None) is not None:
        undo.append(net.head.register_forward_pre_hook(Patch(unmask), with_kwargs=True).remove)
    return undo
