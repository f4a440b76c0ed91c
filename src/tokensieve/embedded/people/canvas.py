"""Six channels that shapes are painted on: red, green, blue, near infrared, heat, and the share of the person."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tokensieve.embedded.people.attributes import Cloth, Point

HEIGHT, WIDTH = 128, 64  # of every picture, in pixels
_RED, _GREEN, _BLUE, NEAR, HEAT, MASK = range(6)  # what a canvas holds for each pixel
_EVERYTHING, LIGHT, ONLY_HEAT = slice(0, 6), slice(0, 4), slice(HEAT, HEAT + 1)
ACROSS = np.arange(WIDTH, dtype=np.float32) + 0.5
DOWN = np.arange(HEIGHT, dtype=np.float32)[:, None] + 0.5
Fill = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (x (w,), y (h, 1)) -> (channels, h, w)


class Canvas:
    """Red, green, blue, near infrared, heat and the share of each pixel that shows the person: (6, HEIGHT, WIDTH)."""

    def __init__(self) -> None:
        self.pixels = np.zeros((6, HEIGHT, WIDTH), dtype=np.float32)

    def _paint(
        self,
        box: tuple[float, float, float, float],
        distance: Fill,
        fill: np.ndarray | Fill,
        channels: slice,
        soft: float = 1.0,
    ) -> None:
        """Blend a fill over all pixels of a box (left, top, right, bottom) whose signed distance is negative."""
        left, top = max(0, int(box[0]) - 1), max(0, int(box[1]) - 1)
        right, bottom = min(WIDTH, int(box[2]) + 2), min(HEIGHT, int(box[3]) + 2)
        if left >= right or top >= bottom:
            return
        x, y = ACROSS[left:right], DOWN[top:bottom]
        alpha = distance(x, y)
        alpha *= -1 / soft
        alpha += 0.5
        np.minimum(np.maximum(alpha, 0, out=alpha), 1, out=alpha)
        values = fill(x, y) if callable(fill) else fill[:, None, None]
        there = self.pixels[channels, top:bottom, left:right]
        there += alpha * (values - there)

    def polygon(self, points: list[Point], fill: np.ndarray | Fill, channels: slice = _EVERYTHING, grow: float = 0.0) -> None:
        """A convex polygon, its corners in clockwise order as seen on the screen; `grow` pixels of rounded border more."""
        planes = []
        for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1], strict=True):
            length = math.hypot(x1 - x0, y1 - y0) or 1.0
            normal = ((y1 - y0) / length, -(x1 - x0) / length)
            planes.append((normal[0], normal[1], normal[0] * x0 + normal[1] * y0))

        def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            far = x * planes[0][0] + (y * planes[0][1] - planes[0][2])
            for across, down, offset in planes[1:]:
                np.maximum(far, x * across + (y * down - offset), out=far)
            return far - grow

        xs, ys = [p[0] for p in points], [p[1] for p in points]
        self._paint((min(xs) - grow, min(ys) - grow, max(xs) + grow, max(ys) + grow), distance, fill, channels)

    def capsule(
        self, a: Point, b: Point, radius: float, end: float, fill: np.ndarray | Fill, channels: slice = _EVERYTHING
    ) -> None:
        """A limb from a to b, whose radius goes from one value to another."""
        dx, dy = b[0] - a[0], b[1] - a[1]
        square = dx * dx + dy * dy or 1.0

        def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            x, y = x - a[0], y - a[1]
            along = np.minimum(np.maximum(x * (dx / square) + y * (dy / square), 0), 1)
            x, y = x - along * dx, y - along * dy
            return np.sqrt(x * x + y * y) - (radius + (end - radius) * along)

        wide = max(radius, end)
        box = (min(a[0], b[0]) - wide, min(a[1], b[1]) - wide, max(a[0], b[0]) + wide, max(a[1], b[1]) + wide)
        self._paint(box, distance, fill, channels)

    def ellipse(
        self,
        centre: Point,
        half: Point,
        fill: np.ndarray | Fill,
        channels: slice = _EVERYTHING,
        soft: float = 1.0,
    ) -> None:
        small = min(half)

        def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            return (np.sqrt(((x - centre[0]) / half[0]) ** 2 + ((y - centre[1]) / half[1]) ** 2) - 1) * small

        reach = soft / 2 * max(half) / small
        box = (
            centre[0] - half[0] - reach,
            centre[1] - half[1] - reach,
            centre[0] + half[0] + reach,
            centre[1] + half[1] + reach,
        )
        self._paint(box, distance, fill, channels, soft)

    def box(self, left: float, top: float, right: float, bottom: float, fill: np.ndarray | Fill, grow: float = 0.0) -> None:
        def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            across = np.maximum(left - x, x - right)
            return np.maximum(across, np.maximum(top - y, y - bottom)) - grow

        self._paint((left - grow, top - grow, right + grow, bottom + grow), distance, fill, _EVERYTHING)


def channel_values(colour: np.ndarray, near: float, heat: float, mask: float) -> np.ndarray:
    return np.array([*colour, near, heat, mask], dtype=np.float32)


AIR_HEAT, SKIN_HEAT = 0.3, 0.95  # heat of cold cloth and of bare skin


def draw_pattern(cloth: Cloth, u: np.ndarray, v: np.ndarray) -> np.ndarray | float:
    """Where the second colour is (0..1), at u across and v down the body."""
    if cloth.pattern == "stripes":
        return np.clip(np.sin(v * (2 * math.pi / cloth.period)) * 2.5 + 0.5, 0, 1) + 0 * u
    if cloth.pattern == "bars":
        return np.clip(np.cos(u * (2 * math.pi / cloth.period)) * 2.5 + 0.5, 0, 1) + 0 * v
    if cloth.pattern == "checks":
        wave = math.pi / cloth.period
        return np.clip(np.sin(u * wave) * np.sin(v * wave) * 4 + 0.5, 0, 1)
    if cloth.pattern == "halves":
        return np.clip((v - 0.3) * 60 + 0.5, 0, 1) + 0 * u
    if cloth.pattern == "logo":
        return np.clip((0.05 - np.hypot(u, v - 0.28)) * 60 + 0.5, 0, 1)
    return 0.0
