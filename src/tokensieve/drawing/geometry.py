"""Where a model's input lies in the original image: found by sending images that encode coordinates through its transform.

The transform is a black box that may resize, crop, pad and normalise. A black and a white image undo the normalisation and
separate pixels of the image from padding; then grey ramps along x and along y give the origin of each of these pixels. A ramp
has 256 levels, so it is drawn again over the visible area until that area fills it: a narrow crop of a wide image is located as
exactly as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from tokensieve.errors import UserError

EDGE = 2.5  # pixels at the border of an image that interpolation treats in its own way
RAMP_TOLERANCE = 0.05  # share of the ramp by which a pixel may miss the straight line


@dataclass(frozen=True)
class Frame:
    """A rectangle in pixels of the original image; edges, not centres, so the whole image is (0, 0, width, height)."""

    left: float
    top: float
    right: float
    bottom: float
    size: tuple[int, int] | None = None  # (height, width) of the model's input in its own pixels, where it is known

    def patches(self, grid: tuple[int, int]) -> np.ndarray:
        """(N, 4): left, top, right, bottom of every patch in raster order.

        What whole patches do not fill of the input lies at its right and its bottom: no patch sees it.
        """
        h, w = grid
        high, wide = self.size or grid
        across = np.arange(w + 1) * (wide // w / wide)  # shares of the frame's width
        down = np.arange(h + 1) * (high // h / high)
        x, y = self.left + (self.right - self.left) * across, self.top + (self.bottom - self.top) * down
        left, top = np.meshgrid(x[:-1], y[:-1])
        right, bottom = np.meshgrid(x[1:], y[1:])
        corners = [np.minimum(left, right), np.minimum(top, bottom), np.maximum(left, right), np.maximum(top, bottom)]
        return np.stack(corners, axis=-1).reshape(h * w, 4)


def find_frame(transform: Callable[[Any], Any], size: tuple[int, int]) -> Frame:
    """Where in an image of this (width, height) the transform's output lies."""
    black, white = (_through(transform, np.full(size[::-1], grey, np.uint8)) for grey in (0, 255))
    gain = white - black  # (H, W)
    seen = np.abs(gain) > 0.5 * np.abs(gain).max()
    if not seen.any():
        raise UserError("the transform gives the same for a black and for a white image, so it cannot be drawn")

    def values(ramp: np.ndarray) -> np.ndarray:
        shades = np.broadcast_to(np.rint(255 * ramp), size[::-1]).astype(np.uint8)
        return (_through(transform, shades) - black) / np.where(seen, gain, 1)  # (H, W), 0 to 1 where seen

    left, right = _edges(lambda ramp: values(ramp[None, :]), seen, size[0], axis=1)
    top, bottom = _edges(lambda ramp: values(ramp[:, None]), seen, size[1], axis=0)
    return Frame(left, top, right, bottom, (seen.shape[0], seen.shape[1]))


def _through(transform: Callable[[Any], Any], grey: np.ndarray) -> np.ndarray:
    """(h, w) grey -> (H, W), the mean over the channels."""
    out = transform(Image.fromarray(grey).convert("RGB"))
    return np.asarray(out, dtype=np.float64).mean(axis=0)


def _edges(values: Callable[[np.ndarray], np.ndarray], seen: np.ndarray, length: int, axis: int) -> tuple[float, float]:
    """Where the two ends of the input's axis lie along a side of the original that has this length."""
    places = np.flatnonzero(seen.any(axis=1 - axis))  # pixels of the input along the axis
    first, last = places[0], places[-1] + 1
    extent = seen.shape[axis]
    whole = -first * length / (last - first), (extent - first) * length / (last - first)  # if the whole side is seen
    if length < 4:
        return whole
    low, high = 0.0, float(length)  # the ramp goes from 0 at low to 1 at high
    middles = np.arange(length) + 0.5
    while True:
        value = values(((middles - low) / (high - low)).clip(0, 1))
        along = np.ma.masked_array(value, ~seen).mean(axis=1 - axis)[places]  # (P,)
        came_from = low + (high - low) * np.asarray(along)
        margin = 3 * (high - low) / 255 + 2
        narrow = max(0.0, came_from.min() - margin), min(float(length), came_from.max() + margin)
        if narrow[1] - narrow[0] > 0.6 * (high - low):
            break
        low, high = narrow
    edge = min(EDGE, length / 4)
    straight = (came_from > max(edge, low + 0.01 * (high - low))) & (came_from < min(length - edge, high - 0.01 * (high - low)))
    if straight.sum() < 3:
        return whole
    slope, start = np.polyfit(places[straight] + 0.5, came_from[straight], 1)
    if np.abs(start + slope * (places[straight] + 0.5) - came_from[straight]).max() > RAMP_TOLERANCE * (high - low):
        raise UserError("the transform does more than resize, crop and pad, so its patches have no place in the image")
    return float(start), float(start + slope * extent)
