"""Where the tokens of an image lie in it, for models whose tokens are not those of one tower's grid: for pictures."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIZES = ("image_grid_thw", "image_sizes")  # arguments of get_image_features that tell the sizes of images


@dataclass(frozen=True)
class TokenGrid:
    """Rows of tokens that cover the image. `before` them stand tokens of the whole image made small; `ends` follow each row."""

    rows: int
    columns: int
    before: int = 0
    ends: int = 0

    @property
    def total(self) -> int:
        return self.before + self.rows * (self.columns + self.ends)

    def indices(self) -> Tensor:
        """The tokens of the rows among all tokens of the image, in raster order: (rows * columns,)."""
        starts = self.before + (self.columns + self.ends) * torch.arange(self.rows)
        return (starts[:, None] + torch.arange(self.columns)).flatten()


TokenGrids = Callable[[Any, Mapping[str, Any]], list[TokenGrid]]  # (inner model, arguments by name) -> of each image


def name_arguments(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    named = dict(bound.arguments)
    more: dict[str, Any] = named.pop("kwargs", {})
    return named | more


def qwen_grids(inner: Any, arguments: Mapping[str, Any]) -> list[TokenGrid]:
    """Squares of patches; each is one token."""
    merge = int(inner.config.vision_config.spatial_merge_size)
    return [TokenGrid(t * h // merge, w // merge) for t, h, w in arguments["image_grid_thw"].tolist()]


def tile_grids(inner: Any, arguments: Mapping[str, Any]) -> list[TokenGrid]:
    """The whole image made small, then tiles of it without their padding, a line end after each row (LLaVA-NeXT, OneVision)."""
    library: Any = importlib.import_module(type(inner).__module__)
    config = inner.config
    side = config.vision_config.image_size // config.vision_config.patch_size
    aspect = getattr(config, "vision_aspect_ratio", "")
    made = []
    for size in arguments["image_sizes"]:
        tiles = library.get_anyres_image_grid_shape(size, config.image_grid_pinpoints, config.vision_config.image_size)
        padded = torch.empty(1, tiles[0] * side, tiles[1] * side, device="meta")
        _, rows, columns = library.unpad_image(padded, size).shape
        if aspect.startswith("anyres_max_"):  # too many are averaged to fewer
            ratio = math.sqrt(rows * columns / (int(aspect.removeprefix("anyres_max_")) * side**2))
            rows, columns = (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)
        made.append(TokenGrid(rows, columns, before=side**2, ends=1))
    return made
