"""The tokens of images that a processor cuts into tiles of one size, of which only the prompt tells the image.

The last tile of several is the whole image made small. Where the prompt is not known (image features asked for on their own),
each tile counts as an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokensieve.models.image_grid import ImageTokens, Tile, TokenGrid


def run_layouts(inner: Any, arguments: Mapping[str, Any], ids: Tensor | None) -> list[ImageTokens]:
    """The tiles of an image follow each other without anything between them (InternVL)."""
    vision = inner.config.vision_config
    side = round(vision.image_size[0] // vision.patch_size[0] * inner.config.downsample_ratio)
    counts = [(stop - start) // side**2 for row in _runs(inner, ids) for start, stop in row]
    return _layouts(counts, len(arguments["pixel_values"]), side)


def marked_layouts(inner: Any, arguments: Mapping[str, Any], ids: Tensor | None) -> list[ImageTokens]:
    """Before each tile stand a mark and the tile's place; a mark ends the last tile of an image (Idefics3, SmolVLM).

    So between two tiles there is one mark if they are of one image, and at least two if they are not.
    """
    vision = inner.config.vision_config
    side = vision.image_size // vision.patch_size // inner.config.scale_factor
    counts: list[int] = []
    for row, runs in zip([] if ids is None else ids, _runs(inner, ids), strict=True):
        before = None
        for start, stop in runs:
            mark = row[start - 2] if start > 1 else None
            if before is None or mark is None or int((row[before:start] == mark).sum()) > 1:
                counts.append(0)
            counts[-1] += (stop - start) // side**2
            before = stop
    pixels = arguments["pixel_values"]  # (B, tiles of the prompt with most of them, 3, H, W), zeros are no tile
    return _layouts(counts, int(pixels.flatten(2).any(-1).sum()), side)


def _layouts(counts: list[int], tiles: int, side: int) -> list[ImageTokens]:
    """Images of so many tiles each, of `side` x `side` tokens; of one tile each where the prompt tells of others."""
    made = []
    for count in counts if sum(counts) == tiles else [1] * tiles:
        at = torch.arange(count * side**2).split(side**2)
        drawn = TokenGrid(side, side, before=(count - 1) * side**2)
        made.append(ImageTokens(count * side**2, tuple(Tile((side, side), own) for own in at), drawn))
    return made


def _runs(inner: Any, ids: Tensor | None) -> list[list[tuple[int, int]]]:
    """Where each prompt has placeholders without anything between them: (start, stop) of each run."""
    if ids is None:
        return []
    is_image = torch.nn.functional.pad((ids == inner.config.image_token_id).int(), (1, 1))  # (B, L+2)
    found = []
    for row in is_image.diff(dim=1):  # (L+1,)
        starts, stops = ((row == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
        found.append(list(zip(starts, stops, strict=True)))
    return found
