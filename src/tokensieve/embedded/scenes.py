"""Scenes drawn by code: a picture, its caption and questions about it, all from (seed, index).

A scene is plain data (what lies where, in which light); `render` turns it into 112 x 112 RGB. Shapes are drawn from
tables of signed distances, so that one object costs a rotation of its bounding box and a look-up. Places are
uniform over the image, whatever later reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

SIZE = 112  # height and width of every picture, in pixels
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "crescent", "heart", "arrow", "bar")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 30, 30),
    "yellow": (235, 215, 30),
    "green": (35, 165, 45),
    "cyan": (50, 210, 215),
    "blue": (40, 55, 215),
    "magenta": (215, 50, 200),
    "white": (245, 245, 245),
    "black": (14, 14, 14),
}
TEXTURES = ("plain", "stripes", "checks", "shade")
GROUND, EDGE = -1, -2  # what `cells` finds where no object is, and where there is only a bit of one
Pair = tuple[str, str]  # (colour, shape)
PAIRS: tuple[Pair, ...] = tuple((colour, shape) for shape in SHAPES for colour in COLOURS)
# Twelve pairs that no training picture shows: every shape misses one or two colours, every colour one or two shapes.
HELD_OUT: tuple[Pair, ...] = (
    ("red", "circle"),
    ("yellow", "square"),
    ("green", "triangle"),
    ("cyan", "star"),
    ("blue", "cross"),
    ("magenta", "ring"),
    ("white", "crescent"),
    ("black", "heart"),
    ("red", "arrow"),
    ("blue", "bar"),
    ("green", "star"),
    ("white", "square"),
)
SEEN: tuple[Pair, ...] = tuple(pair for pair in PAIRS if pair not in HELD_OUT)


def name_of(pair: Pair) -> str:
    """The words for a pair: ("red", "circle") is "red circle"."""
    return " ".join(pair)


@dataclass(frozen=True)
class Thing:
    """One drawn shape. `size` is the diameter of the circle around it; x, y its centre, all in pixels."""

    shape: str
    colour: str
    rgb: tuple[float, float, float]
    x: float
    y: float
    size: float
    angle: float
    texture: str
    phase: float  # where the texture starts, and how coarse it is

    @property
    def pair(self) -> Pair:
        return (self.colour, self.shape)


@dataclass(frozen=True)
class Light:
    """Brightness, a linear gradient across the picture and a slight colour cast."""

    brightness: float
    slope: tuple[float, float]
    cast: tuple[float, float, float]


@dataclass(frozen=True)
class Scene:
    """Everything `render` needs. `ground_seed` stands for the background's random field and the pixel noise."""

    objects: tuple[Thing, ...]
    behind: tuple[Thing, ...]  # distractors under the objects
    before: tuple[Thing, ...]  # distractors that may cover a bit of them
    light: Light
    lines: tuple[tuple[float, float, float, float], ...]  # clutter: (angle, offset, half width, grey)
    stripes: tuple[float, float, float, float]  # background texture: waves across, waves down, phase, strength
    relief: float  # strength of the blobs
    noise: float  # half width of the uniform pixel noise
    ground_seed: int
    grain_seed: int | None = None  # of the pixel noise, where it is another than the background's: frames of a clip


@dataclass(frozen=True)
class Difficulty:
    """How hard a scene is, from 0 (large, clean) to 1 (as the test has it). Only training uses less than 1."""

    level: float = 1.0

    def between(self, easy: float, hard: float) -> float:
        return easy + (hard - easy) * self.level

    @property
    def smallest(self) -> float:
        return self.between(44, 30)

    @property
    def largest(self) -> float:
        return self.between(56, 64)


FULL = Difficulty()
_CELLS = 160  # the table's resolution
_REACH = 1.15  # the table covers [-reach, reach]^2; shapes fill the unit circle


def _arc(radius: float, start: float, stop: float, steps: int, centre: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
    t = np.linspace(start, stop, steps)
    return np.stack([centre[0] + radius * np.cos(t), centre[1] + radius * np.sin(t)], axis=1)


def _contours(shape: str) -> list[np.ndarray]:
    """The closed outlines of a shape in the unit circle; a point inside an odd number of them is inside the shape."""
    turn = 2 * math.pi
    if shape == "circle":
        return [_arc(0.92, 0, turn, 65)[:-1]]
    if shape == "square":
        return [_arc(1.0, turn / 8, turn * 9 / 8, 5)[:-1]]
    if shape == "triangle":
        return [_arc(1.0, -turn / 4, turn * 3 / 4, 4)[:-1]]
    if shape == "star":
        spikes = _arc(1.0, -turn / 4, turn * 3 / 4, 11)[:-1]
        spikes[1::2] *= 0.42
        return [spikes]
    if shape == "cross":
        a, b = 0.95, 0.3
        corners = [(-b, -a), (b, -a), (b, -b), (a, -b), (a, b), (b, b), (b, a), (-b, a), (-b, b), (-a, b), (-a, -b), (-b, -b)]
        return [np.array(corners)]
    if shape == "ring":
        return [_arc(0.97, 0, turn, 65)[:-1], _arc(0.55, 0, turn, 65)[:-1]]
    if shape == "crescent":
        # An outer circle less a circle of the same kind moved sideways: two arcs that meet in the horns.
        outer, inner, shift = 1.0, 0.8, 0.5
        x = (outer**2 - inner**2 + shift**2) / (2 * shift)
        horn, bite = math.acos(x / outer), math.acos((x - shift) / inner)
        back = _arc(outer, horn, turn - horn, 48)
        front = _arc(inner, turn - bite, bite, 32, (shift, 0.0))
        return [np.concatenate([back, front[1:-1]])]
    if shape == "heart":
        t = np.linspace(0, turn, 65)[:-1]
        across = 16 * np.sin(t) ** 3
        up = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
        return [np.stack([across, -(up + 2.5)], axis=1) / 18.2]
    if shape == "arrow":
        return [np.array([(1.0, 0.0), (0.1, 0.8), (0.1, 0.3), (-0.95, 0.3), (-0.95, -0.3), (0.1, -0.3), (0.1, -0.8)])]
    if shape == "bar":
        a, b = 0.96, 0.28
        return [np.array([(-a, -b), (a, -b), (a, b), (-a, b)])]
    raise KeyError(shape)


@cache
def _distances(shape: str) -> np.ndarray:
    """Signed distance to the outline, negative inside, on a fine grid over [-reach, reach]^2; flat, raster order."""
    axis = (np.arange(_CELLS) + 0.5) / _CELLS * 2 * _REACH - _REACH
    x, y = np.meshgrid(axis, axis)  # (cells, cells)
    nearest = np.full(x.shape, np.inf)
    inside = np.zeros(x.shape, bool)
    for outline in _contours(shape):
        for (ax, ay), (bx, by) in zip(outline, np.roll(outline, -1, axis=0), strict=True):
            ex, ey = bx - ax, by - ay
            t = np.clip(((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey), 0, 1)
            nearest = np.minimum(nearest, np.hypot(x - ax - t * ex, y - ay - t * ey))
            if ay != by:
                inside ^= ((ay > y) != (by > y)) & (x < ex * (y - ay) / ey + ax)
    return np.where(inside, -nearest, nearest).astype(np.float32).ravel()


_AXIS = np.arange(SIZE, dtype=np.float32)
_CENTRED = (_AXIS + 0.5) / SIZE - 0.5


@cache
def _stretch(cells: int) -> np.ndarray:
    """The matrix (SIZE, cells) that stretches a coarse row smoothly to the picture's width."""
    place = np.clip((_AXIS + 0.5) / SIZE * cells - 0.5, 0, cells - 1)
    weight = np.maximum(0, 1 - np.abs(place[:, None] - np.arange(cells)))
    return weight.astype(np.float32)


def _ground(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """The background: muted colours that flow into each other, stripes and blobs. (3, H, W)"""
    base = rng.uniform(60, 190, (1, 5, 5)) + rng.uniform(-45, 45, (3, 5, 5))
    canvas = _stretch(5) @ base.astype(np.float32) @ _stretch(5).T  # (3, H, W)
    across, down, phase, strength = scene.stripes
    wave = strength * np.sin(across * _AXIS + (down * _AXIS)[:, None] + np.float32(phase))  # (H, W)
    blobs = rng.random((16, 16), dtype=np.float32) - np.float32(0.5)
    wave += np.float32(2 * scene.relief) * (_stretch(16) @ blobs @ _stretch(16).T)
    for angle, offset, half_width, grey in scene.lines:
        away = np.abs(math.cos(angle) * _AXIS + (math.sin(angle) * _AXIS)[:, None] - np.float32(offset))  # (H, W)
        wave += np.float32(grey) * np.clip(np.float32(half_width + 0.5) - away, 0, 1)
    canvas += wave
    return canvas


def _draw(canvas: np.ndarray, thing: Thing) -> None:
    """Lay one thing over the canvas (3, H, W), its edge softened over one pixel."""
    radius = thing.size / 2
    left, right = max(0, int(thing.x - radius - 1)), min(SIZE, int(thing.x + radius + 2))
    top, bottom = max(0, int(thing.y - radius - 1)), min(SIZE, int(thing.y + radius + 2))
    if left >= right or top >= bottom:
        return
    x = (_AXIS[left:right] + np.float32(0.5 - thing.x)) * np.float32(1 / radius)  # (w,)
    y = ((_AXIS[top:bottom] + np.float32(0.5 - thing.y)) * np.float32(1 / radius))[:, None]  # (h, 1)
    cos, sin = np.float32(math.cos(thing.angle)), np.float32(math.sin(thing.angle))
    u, v = cos * x + sin * y, cos * y - sin * x  # the thing's own axes, (h, w)
    scale, middle = np.float32(_CELLS / (2 * _REACH)), np.float32(_CELLS / 2)
    column = np.clip(u * scale + middle, 0, _CELLS - 1).astype(np.intp)
    row = np.clip(v * scale + middle, 0, _CELLS - 1).astype(np.intp)
    distance = _distances(thing.shape)[row * _CELLS + column]
    cover = np.clip(np.float32(0.5) - distance * np.float32(radius), 0, 1)  # (h, w)
    paint = np.array(thing.rgb, np.float32)[:, None, None]  # (3, 1, 1)
    if thing.texture == "stripes":
        wave = np.sin(u * np.float32(6 + thing.phase) + np.float32(thing.phase))
        paint = paint * (np.float32(0.86) + np.float32(0.14) * wave)
    elif thing.texture == "checks":
        fine = np.float32(3 + thing.phase / 2)
        paint = paint * (np.float32(0.86) + np.float32(0.14) * np.sign(np.sin(u * fine) * np.sin(v * fine)))
    elif thing.texture == "shade":
        paint = paint * (np.float32(0.84) + np.float32(0.16) * np.clip(u, -1, 1))
    patch = canvas[:, top:bottom, left:right]
    patch += cover * (paint - patch)


def render(scene: Scene) -> np.ndarray:
    """The picture of a scene: uint8 (112, 112, 3). The same scene always gives the same bytes."""
    rng = np.random.default_rng(scene.ground_seed)
    canvas = _ground(scene, rng)
    for thing in (*scene.behind, *scene.objects, *scene.before):
        _draw(canvas, thing)
    light = scene.light
    slope_x, slope_y = light.slope
    shine = np.float32(light.brightness) + np.float32(slope_x) * _CENTRED + (np.float32(slope_y) * _CENTRED)[:, None]
    canvas *= shine * np.array(light.cast, np.float32)[:, None, None]
    if scene.grain_seed is not None:
        rng = np.random.default_rng(scene.grain_seed)
    grain = rng.integers(0, 256, canvas.shape, dtype=np.uint8).astype(np.float32)
    grain -= 127.5
    grain *= np.float32(scene.noise / 127.5)
    canvas += grain
    np.clip(canvas, 0, 255, out=canvas)
    return np.ascontiguousarray(canvas.astype(np.uint8).transpose(1, 2, 0))


def cells(scene: Scene, side: int) -> np.ndarray:
    """Which object fills each square of `side` pixels: its place in scene.objects, GROUND or EDGE.  (SIZE / side, SIZE / side)

    Objects do not overlap. A square that is covered by less than a third is an EDGE: it belongs to neither.
    """
    points = np.arange(2 * SIZE // side, dtype=np.float32) * (side / 2) + side / 4  # two across, two down in each square
    found = np.full((SIZE // side, SIZE // side), GROUND)
    for place, thing in enumerate(scene.objects):
        radius, cos, sin = thing.size / 2, math.cos(thing.angle), math.sin(thing.angle)
        x, y = (points - thing.x) / radius, ((points - thing.y) / radius)[:, None]
        u, v = cos * x + sin * y, cos * y - sin * x
        column, row = (np.clip((w + _REACH) * (_CELLS / (2 * _REACH)), 0, _CELLS - 1).astype(np.intp) for w in (u, v))
        inside = _distances(thing.shape)[row * _CELLS + column] < 0
        cover = inside.reshape(len(found), 2, len(found), 2).mean((1, 3))
        found[cover > 0] = EDGE
        found[cover > 1 / 3] = place
    return found


def random_thing(rng: np.random.Generator, pair: Pair, x: float, y: float, size: float) -> Thing:
    colour, shape = pair
    r, g, b = (float(c) for c in np.array(COLOURS[colour]) + rng.uniform(-14, 14, 3))
    return Thing(
        shape, colour, (r, g, b), x, y, size, rng.uniform(0, 2 * math.pi), TEXTURES[rng.integers(4)], rng.uniform(0, 8)
    )


def dress(rng: np.random.Generator, objects: Sequence[Thing], difficulty: Difficulty) -> Scene:
    """Put objects into a scene: background, light, clutter, noise, and distractors anywhere."""
    most = 1 + difficulty.between(1, 7)
    distractors = []
    for _ in range(int(rng.uniform(difficulty.between(0, 3), most))):
        colour, shape = PAIRS[rng.integers(len(PAIRS))]
        x, y = rng.uniform(0, SIZE, 2)
        distractors.append(random_thing(rng, (colour, shape), x, y, rng.uniform(7, 13)))
    front = len(distractors) // 3
    pitch, direction = rng.uniform(0.15, 0.8), rng.uniform(0, 2 * math.pi)
    strength = rng.uniform(0, difficulty.between(8, 22))
    lines = tuple(
        (rng.uniform(0, math.pi), rng.uniform(-40, 150), rng.uniform(0.5, 1.5), rng.uniform(-70, 70))
        for _ in range(int(rng.uniform(0, difficulty.between(2, 5))))
    )
    red, green, blue = rng.uniform(0.94, 1.06, 3)
    return Scene(
        objects=tuple(objects),
        behind=tuple(distractors[front:]),
        before=tuple(distractors[:front]),
        light=Light(rng.uniform(0.8, 1.12), (rng.uniform(-0.25, 0.25), rng.uniform(-0.25, 0.25)), (red, green, blue)),
        lines=lines,
        stripes=(pitch * math.cos(direction), pitch * math.sin(direction), rng.uniform(0, 2 * math.pi), strength),
        relief=rng.uniform(0, difficulty.between(10, 40)),
        noise=rng.uniform(2, difficulty.between(8, 28)),
        ground_seed=int(rng.integers(2**32)),
    )


def single(seed: int, index: int, pair: Pair, difficulty: Difficulty = FULL) -> Scene:
    """A scene with one object of the given pair; its place is uniform among those where it lies wholly inside."""
    rng = np.random.default_rng([seed, index])
    size = rng.uniform(difficulty.smallest, difficulty.largest)
    x, y = rng.uniform(size / 2, SIZE - size / 2, 2)
    return dress(rng, [random_thing(rng, pair, x, y, size)], difficulty)


def several(
    seed: int, index: int, pairs: Sequence[Pair] = PAIRS, count: int | None = None, difficulty: Difficulty = FULL
) -> Scene:
    """A scene with 2 to 4 objects (or `count`) of different shapes and different colours that do not overlap."""
    rng = np.random.default_rng([seed, index])
    wanted = int(rng.integers(2, 5)) if count is None else count
    chosen: list[Pair] = []
    while len(chosen) < wanted:
        colour, shape = pairs[int(rng.integers(len(pairs)))]
        if all(colour != c and shape != s for c, s in chosen):
            chosen.append((colour, shape))
    placed: list[Thing] = []
    tries = 0
    while len(placed) < wanted:
        size = rng.uniform(28, 42 if wanted > 2 else 50)
        x, y = rng.uniform(size / 2, SIZE - size / 2, 2)
        if all(math.hypot(x - other.x, y - other.y) > (size + other.size) / 2 for other in placed):
            placed.append(random_thing(rng, chosen[len(placed)], x, y, size))
        tries += 1
        if tries % 50 == 0:  # a corner was painted shut: begin again
            placed.clear()
    return dress(rng, placed, difficulty)
