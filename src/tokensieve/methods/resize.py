"""Resize: the tower sees a smaller image, so that fewer patches enter its first block.

A step on the image, not on tokens: it stands before all others and has no position and no budget. Position embeddings are
interpolated as the model's own library does it. Where images have sizes of their own (SigLIP2, Qwen-VL), each is resized by
itself, and one that is small enough already stays as it is. On its own it is a control that a token reduction should beat at
the same time.

Interpolation is bicubic. Without the filter against aliasing images stay sharper, and for mild reductions the features stay
nearer to those of the full image (docs/cover.md has the figures); `antialias=yes` filters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tokensieve.core import Resize
from tokensieve.errors import UserError
from tokensieve.methods.registry import image_method


def check_options(options: Mapping[str, Any]) -> None:
    """Raises a UserError for options that make no sense."""
    size, scale = options["size"], options["scale"]
    if size < 0 or not 0 <= scale <= 1:
        raise UserError(f"resize(size={size},scale={scale}): a size is at least 1 pixel, a scale above 0 and at most 1")
    if bool(size) == bool(scale):
        raise UserError(
            "resize: how large? Give the shorter side in pixels, for example resize(size=192), or as a share of the "
            "model's images, resize(scale=0.85)"
        )


@image_method(summary="a smaller image: so many pixels on its shorter side", check=check_options)
def resize(
    image_size: tuple[int, int],
    patch_size: tuple[int, int],
    *,
    size: int = 0,
    scale: float = 0.0,
    antialias: Literal["yes", "no"] = "no",
) -> Resize:
    """The image size (h, w) with this shorter side or at this scale, in whole patches."""
    factor = scale or size / min(image_size)
    h, w = (max(1, round(side * factor / patch)) * patch for side, patch in zip(image_size, patch_size, strict=True))
    return Resize((h, w), antialias == "yes")
