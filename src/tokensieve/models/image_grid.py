"""What the projector of a vision-language model hands to its language model: which tokens belong to which image and tile.

A family describes it with one function, a `TokenLayouts`. Cuts, budgets, ledgers and pictures follow from that.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

SIZES = ("image_grid_thw", "image_sizes")  # arguments of get_image_features that tell the sizes of images


IMAGE, VIDEO = "image", "video"  # media: they begin the names of a model's methods and arguments


@dataclass(frozen=True)
class TokenGrid:
    """Rows of tokens that cover the image, for pictures. `before` them are tokens of the whole image made small.

    Of a video, `frames` of such rows one after another.
    """

    rows: int
    columns: int
    before: int = 0
    frames: int = 0  # 0: an image

    def indices(self) -> Tensor:
        """The tokens of the rows among all tokens that can be cut, in raster order: (frames * rows * columns,)."""
        return self.before + torch.arange(max(1, self.frames) * self.rows * self.columns)


@dataclass(frozen=True)
class Tile:
    """Tokens of an image that a method sees together, as one grid; or those of a video."""

    grid: tuple[int, ...] | None  # (h, w), of a video (frames, h, w); None: unknown
    at: Tensor  # (N,), where they are among the placeholders of the image, in raster order


@dataclass(frozen=True)
class ImageTokens:
    """What the projector hands to the language model for one image or video. Tokens of no tile, such as line ends, stay in
    place."""

    total: int  # placeholders of the image in the prompt
    tiles: tuple[Tile, ...]
    drawn: TokenGrid | None = None
    rows: int = 1  # of the tower's batch
    is_averaged: bool = False  # tokens of tiles are averages of several patches

    @classmethod
    def single(cls, grid: tuple[int, ...], after: int = 0) -> ImageTokens:
        """An image or video that is one tile. after: tokens behind it that stay."""
        n, frames = math.prod(grid), grid[0] if len(grid) == 3 else 0
        return cls(n + after, (Tile(grid, torch.arange(n)),), TokenGrid(grid[-2], grid[-1], frames=frames))

    @property
    def grid(self) -> tuple[int, ...] | None:
        """The grid of an image that is one tile, else None."""
        return self.tiles[0].grid if len(self.tiles) == 1 else None

    def movable(self) -> Tensor:
        """The placeholders of the tokens that can be cut, in ascending order: (N,)."""
        if len(self.tiles) == 1:
            return self.tiles[0].at
        return torch.cat([tile.at for tile in self.tiles]).sort().values

    def only(self, kept: Tensor) -> ImageTokens:
        """The image with these of its tokens alone: kept (N,) is True for them, at their placeholders."""
        left = (Tile(tile.grid if kept[tile.at].all() else None, tile.at[kept[tile.at]]) for tile in self.tiles)
        return replace(self, tiles=tuple(tile for tile in left if len(tile.at)))

    def fixed(self) -> Tensor:
        """The placeholders of the tokens that stay in place, in ascending order: (F,)."""
        stays = torch.ones(self.total, dtype=torch.bool)
        for tile in self.tiles:
            stays[tile.at] = False
        return stays.nonzero()[:, 0]


# (inner model, arguments of get_image_features by name, ids of the prompts (B, L) where they are known) -> of each image
TokenLayouts = Callable[[Any, Mapping[str, Any], Tensor | None], list[ImageTokens]]


def name_arguments(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    named = dict(bound.arguments)
    more: dict[str, Any] = named.pop("kwargs", {})
    return named | more


def qwen_layouts(inner: Any, arguments: Mapping[str, Any], ids: Tensor | None) -> list[ImageTokens]:
    """Squares of patches; each is one token."""
    merge = int(inner.config.vision_config.spatial_merge_size)
    return [ImageTokens.single((t * h // merge, w // merge)) for t, h, w in arguments["image_grid_thw"].tolist()]


def qwen_video_layouts(inner: Any, arguments: Mapping[str, Any], ids: Tensor | None) -> list[ImageTokens]:
    """Squares of patches in pairs of frames; each is one token."""
    merge = int(inner.config.vision_config.spatial_merge_size)
    return [ImageTokens.single((t, h // merge, w // merge)) for t, h, w in arguments["video_grid_thw"].tolist()]


def pooled_video_layouts(inner: Any, arguments: Mapping[str, Any], ids: Tensor | None) -> list[ImageTokens]:
    """Frames averaged to half their sides, and a line end after the last (LLaVA-OneVision)."""
    videos, frames = arguments["pixel_values_videos"].shape[:2]
    vision = inner.config.vision_config
    side = math.ceil(vision.image_size // vision.patch_size / 2)
    return [ImageTokens.single((frames, side, side), after=1)] * videos


def sized_layouts(inner: Any, arguments: Mapping[str, Any], ids: Tensor | None) -> list[ImageTokens]:
    """Squares of patches of images of any size, or single patches (Mistral 3, Pixtral)."""
    side = int(inner.config.vision_config.patch_size) * int(getattr(inner.config, "spatial_merge_size", 1))
    return [ImageTokens.single((int(h) // side, int(w) // side)) for h, w in arguments["image_sizes"]]


def pooled_layouts(inner: Any, arguments: Mapping[str, Any], ids: Tensor | None) -> list[ImageTokens]:
    """Images of one size, whose patches are averaged to squares (Gemma 3)."""
    side = math.isqrt(int(inner.config.mm_tokens_per_image))
    return [ImageTokens.single((side, side)) for _ in arguments["pixel_values"]]


def tile_layouts(inner: Any, arguments: Mapping[str, Any], ids: Tensor | None) -> list[ImageTokens]:
    """The whole image made small, then tiles of it without their padding, row by row through all tiles, with a line end after
    each row (LLaVA-NeXT, OneVision). One of several images of a prompt is not cut into tiles (OneVision)."""
    library: Any = importlib.import_module(type(inner).__module__)
    config = inner.config
    side = config.vision_config.image_size // config.vision_config.patch_size
    per_prompt = arguments.get("batch_num_images")
    has_tiles = [True] * len(arguments["image_sizes"]) if per_prompt is None else [n == 1 for n in per_prompt for _ in range(n)]
    whole = Tile((side, side), torch.arange(side**2))
    made = []
    for size, is_tiled in zip(arguments["image_sizes"], has_tiles, strict=True):
        if not is_tiled:
            made.append(ImageTokens(side**2 + 1, (whole,), TokenGrid(side, side)))
            continue
        tiles = library.get_anyres_image_grid_shape(size, config.image_grid_pinpoints, config.vision_config.image_size)
        full = torch.empty(1, tiles[0] * side, tiles[1] * side, device="meta")
        shape = library.unpad_image(full, size).shape[1:]
        rows, columns = _averaged(shape, side, getattr(config, "vision_aspect_ratio", ""))
        of_row, of_column = (
            _tile_numbers(n, kept, count * side, side) for n, kept, count in zip((rows, columns), shape, tiles, strict=True)
        )
        at = side**2 + torch.arange(rows)[:, None] * (columns + 1) + torch.arange(columns)  # (rows, columns)
        parts = [at[of_row == i][:, of_column == j] for i in of_row.unique().tolist() for j in of_column.unique().tolist()]
        tiled = tuple(Tile((part.shape[0], part.shape[1]), part.flatten()) for part in parts)
        drawn, is_averaged = TokenGrid(rows, columns, before=side**2), (rows, columns) != tuple(shape)
        total = side**2 + rows * (columns + 1)
        made.append(ImageTokens(total, (whole, *tiled), drawn, 1 + math.prod(tiles), is_averaged))
    return made


def _averaged(shape: Sequence[int], side: int, aspect: str) -> tuple[int, int]:
    """The rows and columns that OneVision leaves of so many: it averages an image with too many of them."""
    rows, columns = shape
    if not aspect.startswith("anyres_max_"):
        return rows, columns
    ratio = math.sqrt(rows * columns / (int(aspect.removeprefix("anyres_max_")) * side**2))
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)


def _tile_numbers(n: int, kept: int, full: int, side: int) -> Tensor:
    """The row (or column) of tiles that each of n rows of tokens is in, (n,).

    kept: rows without padding, from which the n were averaged; full: rows with padding, half of it before them.
    """
    return ((full - kept) // 2 + (2 * torch.arange(n) + 1) * kept // (2 * n)) // side
