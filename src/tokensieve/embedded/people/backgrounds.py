"""What stands behind and in front of a person: streets, halls, car parks, parks and things in the way."""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image

from tokensieve.embedded.people.attributes import CLOTH_COLOURS, VERSION, Point, pick
from tokensieve.embedded.people.canvas import HEIGHT, ONLY_HEAT, WIDTH, Canvas, channel_values


@cache
def _noise() -> np.ndarray:
    """Smooth noise of unit deviation, coarse and fine: (2, 256, 256). Shots cut their textures out of it."""
    rng = np.random.default_rng([VERSION, 2])
    layers = []
    for cell in (16, 4):
        small = Image.fromarray(rng.standard_normal((256 // cell, 256 // cell)).astype(np.float32))
        layer = np.asarray(small.resize((256, 256), Image.Resampling.BICUBIC))
        layers.append(layer / layer.std())
    return np.stack(layers)


def texture(rng: np.random.Generator, layer: int) -> np.ndarray:
    top, left = int(rng.integers(256 - HEIGHT)), int(rng.integers(256 - WIDTH))
    return _noise()[layer, top : top + HEIGHT, left : left + WIDTH]


def stuff(rng: np.random.Generator, colour: tuple[float, float, float], spread: float, near: Point, heat: Point) -> np.ndarray:
    return channel_values(
        np.clip(np.array(colour) + rng.normal(0, spread / 2, 3) + rng.normal(0, spread), 0, 1),
        rng.uniform(*near),
        rng.uniform(*heat),
        0,
    )


def any_colour(rng: np.random.Generator) -> tuple[float, float, float]:
    return CLOTH_COLOURS[pick(rng, tuple(CLOTH_COLOURS))]


def _ground(rng: np.random.Generator, canvas: Canvas, wall: np.ndarray, floor: np.ndarray) -> float:
    """Wall above, floor below; the height at which they meet."""
    meet = float(rng.uniform(68, 104))
    canvas.pixels[:, :, :] = wall[:, None, None]
    tilt = float(rng.uniform(-5, 5))
    canvas.polygon([(-2, meet), (WIDTH + 2, meet + tilt), (WIDTH + 2, HEIGHT + 2), (-2, HEIGHT + 2)], floor)
    return meet


def street(rng: np.random.Generator, canvas: Canvas) -> None:
    """A wall with windows and a door, a pavement, poles."""
    brick = pick(rng, ((0.62, 0.36, 0.28), (0.7, 0.66, 0.58), (0.5, 0.5, 0.52)))
    meet = _ground(
        rng,
        canvas,
        stuff(rng, brick, 0.06, (0.35, 0.7), (0.3, 0.5)),
        stuff(rng, (0.5, 0.5, 0.5), 0.06, (0.3, 0.5), (0.25, 0.45)),
    )
    wide, high = rng.uniform(11, 19), rng.uniform(16, 26)
    offset, gap = rng.uniform(-15, 0), rng.uniform(4, 10)
    for row in range(3):
        top = 3 + row * (high + gap + 3)
        for column in range(4):
            left = offset + column * (wide + gap)
            if top + high < meet and rng.random() < 0.8:
                lit = rng.random() < 0.25
                glass = stuff(
                    rng, (0.9, 0.82, 0.5) if lit else (0.2, 0.26, 0.33), 0.06, (0.05, 0.4), (0.55, 0.9) if lit else (0.05, 0.35)
                )
                canvas.box(left, top, left + wide, top + high, glass)
    if rng.random() < 0.5:
        left = rng.uniform(-5, 55)
        canvas.box(left, meet - 45, left + 18, meet, stuff(rng, any_colour(rng), 0.05, (0.1, 0.9), (0.2, 0.7)))
    for _ in range(int(rng.integers(1, 4))):
        x = rng.uniform(0, WIDTH)
        fill = stuff(rng, (0.3, 0.3, 0.32), 0.1, (0.1, 0.8), (0.1, 0.6))
        canvas.capsule((x, -5), (x + rng.uniform(-2, 2), meet + rng.uniform(0, 20)), 2.0, 2.4, fill)
        if rng.random() < 0.5:
            canvas.ellipse((x, rng.uniform(5, 30)), (5, 4), stuff(rng, (0.95, 0.9, 0.7), 0.03, (0.8, 1), (0.8, 1.1)))


def park(rng: np.random.Generator, canvas: Canvas) -> None:
    """Sky, grass, bushes and trunks."""
    meet = _ground(
        rng,
        canvas,
        stuff(rng, (0.66, 0.78, 0.9), 0.06, (0.1, 0.4), (0.0, 0.15)),
        stuff(rng, (0.34, 0.48, 0.2), 0.07, (0.6, 0.85), (0.25, 0.45)),
    )
    for _ in range(int(rng.integers(2, 5))):
        x = rng.uniform(-4, WIDTH + 4)
        trunk = stuff(rng, (0.32, 0.24, 0.16), 0.05, (0.2, 0.6), (0.3, 0.6))
        canvas.capsule((x, -5), (x + rng.uniform(-6, 6), meet + 5), rng.uniform(2, 4), rng.uniform(2.5, 5), trunk)
    for _ in range(int(rng.integers(9, 16))):
        leaf = stuff(rng, (0.2, 0.38, 0.14), 0.09, (0.55, 0.98), (0.2, 0.5))
        where = (rng.uniform(-5, WIDTH + 5), rng.uniform(-5, meet + 12))
        canvas.ellipse(where, (rng.uniform(6, 17), rng.uniform(5, 14)), leaf, soft=3.0)
    if rng.random() < 0.5:  # a bench
        x, y = rng.uniform(-10, 50), meet + rng.uniform(0, 10)
        wood = stuff(rng, any_colour(rng), 0.06, (0.2, 0.8), (0.3, 0.75))
        canvas.box(x, y, x + 24, y + 4, wood)
        canvas.box(x + 2, y, x + 4, y + 14, wood)
        canvas.box(x + 20, y, x + 22, y + 14, wood)


def car_park(rng: np.random.Generator, canvas: Canvas) -> None:
    """Asphalt with lines, parked cars with warm engines, lamps."""
    meet = _ground(
        rng,
        canvas,
        stuff(rng, (0.55, 0.58, 0.6), 0.1, (0.2, 0.6), (0.05, 0.35)),
        stuff(rng, (0.28, 0.28, 0.3), 0.05, (0.15, 0.4), (0.3, 0.55)),
    )
    for _ in range(3):
        x = rng.uniform(-10, WIDTH)
        line = stuff(rng, (0.85, 0.85, 0.8), 0.04, (0.6, 0.9), (0.3, 0.5))
        canvas.polygon([(x, meet + 8), (x + 3, meet + 8), (x + 12, HEIGHT + 2), (x + 6, HEIGHT + 2)], line)
    for _ in range(int(rng.integers(2, 5))):
        x, y, long = rng.uniform(-25, 50), meet + rng.uniform(-22, 8), rng.uniform(26, 44)
        paint = stuff(rng, any_colour(rng), 0.05, (0.1, 0.95), (0.2, 0.5))
        canvas.box(
            x + long * 0.2, y - 12, x + long * 0.75, y, stuff(rng, (0.2, 0.25, 0.3), 0.05, (0.05, 0.3), (0.05, 0.3)), grow=2
        )
        canvas.box(x, y, x + long, y + 13, paint, grow=2)
        if rng.random() < 0.6:  # just parked
            heat = np.array([rng.uniform(0.7, 1.15)], dtype=np.float32)
            canvas.ellipse((x + long * 0.15, y + 5), (7, 6), heat, ONLY_HEAT, soft=4.0)
        for wheel in (0.2, 0.8):
            tyre = stuff(rng, (0.07, 0.07, 0.07), 0.02, (0.05, 0.2), (0.3, 0.8))
            canvas.ellipse((x + long * wheel, y + 14), (5, 5), tyre)
    for _ in range(int(rng.integers(1, 3))):
        x = rng.uniform(0, WIDTH)
        post = stuff(rng, (0.6, 0.6, 0.6), 0.1, (0.3, 0.8), (0.1, 0.4))
        canvas.capsule((x, 8), (x, meet), 1.2, 1.8, post)
        canvas.ellipse((x, 8), (6, 3), stuff(rng, (1, 0.95, 0.8), 0.03, (0.8, 1), (0.8, 1.15)))


def hall(rng: np.random.Generator, canvas: Canvas) -> None:
    """A shop front: panels, coloured posters, tiles, radiators, goods on shelves."""
    meet = _ground(
        rng,
        canvas,
        stuff(rng, (0.78, 0.74, 0.68), 0.08, (0.5, 0.9), (0.35, 0.55)),
        stuff(rng, (0.6, 0.56, 0.5), 0.07, (0.3, 0.7), (0.3, 0.5)),
    )
    for _ in range(int(rng.integers(3, 6))):
        left, top = rng.uniform(-12, 58), rng.uniform(-6, meet - 24)
        right, bottom = left + rng.uniform(8, 20), top + rng.uniform(12, 34)
        canvas.box(left, top, right, min(meet, bottom), stuff(rng, any_colour(rng), 0.06, (0.1, 0.95), (0.25, 0.6)))
        canvas.box(left + 2, top + 3, right - 2, top + 7, stuff(rng, any_colour(rng), 0.06, (0.1, 0.95), (0.25, 0.6)))
    shelf = rng.uniform(25, meet - 10)
    for x in np.arange(rng.uniform(-6, 0), WIDTH, rng.uniform(7, 12)):
        goods = stuff(rng, any_colour(rng), 0.06, (0.1, 0.95), (0.15, 0.6))
        canvas.box(x, shelf - rng.uniform(5, 12), x + rng.uniform(4, 7), shelf, goods)
    canvas.box(-2, shelf, WIDTH + 2, shelf + 2, stuff(rng, (0.4, 0.3, 0.2), 0.06, (0.3, 0.7), (0.3, 0.5)))
    if rng.random() < 0.5:  # a radiator
        x = rng.uniform(-8, 52)
        canvas.box(x, meet - 16, x + 20, meet - 1, stuff(rng, (0.9, 0.9, 0.88), 0.03, (0.6, 0.9), (0.8, 1.1)))
    for x in np.arange(rng.uniform(-10, 0), WIDTH + 20, 14):
        line = stuff(rng, (0.4, 0.38, 0.35), 0.03, (0.2, 0.5), (0.3, 0.45))
        canvas.capsule((x, meet), (32 + (x - 32) * 2, HEIGHT + 2), 0.4, 0.7, line)
