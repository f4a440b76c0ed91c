"""People drawn by code in three modalities: visible light (RGB), near infrared (NI) and thermal (TI), for re-identification.

Who a person is (body, clothes, what the cloth does in near infrared, how much heat it lets through) comes from the pid alone;
pose, camera, background, light and what stands in the way come from (pid, camera, shot). All modalities of a shot are painted
at once, so they show the same geometry. The files have RGBNT201's layout and names, so that one reader reads both.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tokensieve.errors import UserError, did_you_mean

VERSION = 1  # of the drawing: to be raised whenever a picture changes
HEIGHT, WIDTH = 128, 64  # of every picture, in pixels
CAMERAS = 4
MODALITIES = ("RGB", "NI", "TI")
QUALITY = 93  # of the JPEG files
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Part:
    """A split: its identities have the pids first, first + 1, ...; each camera takes `shots` pictures of each of them."""

    first: int
    identities: int
    shots: int

    @property
    def pids(self) -> range:
        return range(self.first, self.first + self.identities)


DATASETS: dict[str, dict[str, Part]] = {  # name -> folder of RGBNT201's layout -> what is in it; no pid twice
    "embedded-reid": {"train_171": Part(1, 171, 3), "test": Part(172, 100, 3)},
    "embedded-reid-pretrain": {"train_171": Part(1001, 600, 2)},
}

_Point = tuple[float, float]
_RED, _GREEN, _BLUE, _NEAR, _HEAT, _MASK = range(6)  # what a canvas holds for each pixel
_EVERYTHING, _LIGHT, _ONLY_HEAT = slice(0, 6), slice(0, 4), slice(_HEAT, _HEAT + 1)

# ------------------------------------------------------------------------------------------------------------- identity

_COLOURS: dict[str, tuple[float, float, float]] = {
    "black": (0.08, 0.08, 0.09),
    "grey": (0.45, 0.46, 0.48),
    "white": (0.90, 0.90, 0.88),
    "navy": (0.10, 0.14, 0.36),
    "blue": (0.16, 0.34, 0.78),
    "sky": (0.50, 0.72, 0.90),
    "red": (0.78, 0.12, 0.14),
    "wine": (0.42, 0.08, 0.16),
    "green": (0.14, 0.50, 0.22),
    "olive": (0.38, 0.38, 0.16),
    "yellow": (0.90, 0.78, 0.16),
    "orange": (0.90, 0.46, 0.10),
    "beige": (0.76, 0.66, 0.50),
    "brown": (0.36, 0.22, 0.12),
    "pink": (0.90, 0.52, 0.62),
    "purple": (0.42, 0.20, 0.56),
}
_UPPER: tuple[str, ...] = (
    *("black", "black", "grey", "white", "navy", "blue", "sky", "red", "red", "wine"),
    *("green", "olive", "yellow", "orange", "beige", "pink", "purple"),
)
_LOWER = ("black", "black", "black", "navy", "navy", "grey", "blue", "beige", "olive", "brown", "white", "wine")
_SHOES = ("black", "black", "white", "brown", "red", "grey")
_BAGS = ("black", "black", "brown", "red", "blue", "green", "yellow", "grey")
_HATS = ("black", "white", "red", "navy", "yellow", "green")
_HAIRS = (
    (0.06, 0.05, 0.05),
    (0.06, 0.05, 0.05),
    (0.20, 0.12, 0.07),
    (0.42, 0.26, 0.12),
    (0.70, 0.56, 0.30),
    (0.62, 0.62, 0.62),
)
_SKINS = ((0.93, 0.76, 0.65), (0.86, 0.66, 0.52), (0.70, 0.50, 0.36), (0.45, 0.30, 0.21))
PATTERNS = ("plain", "stripes", "bars", "checks", "halves", "logo")  # stripes lie, bars stand
VIEWS = ("front", "back", "left", "right")


@dataclass(frozen=True)
class Cloth:
    """What a garment is made of: two colours, their near-infrared reflectance, and how much body heat comes through."""

    colour: np.ndarray  # (3,)
    second: np.ndarray  # (3,)
    pattern: str
    period: float  # of the pattern, as a share of the body's height
    near: _Point  # of colour and second: dyes differ in infrared whatever their colour
    warmth: float  # 0 is as cold as the air, 1 as warm as skin


@dataclass(frozen=True)
class Person:
    """Who is drawn: all that stays the same from shot to shot. Lengths are shares of the body's height."""

    height: float  # against the average
    build: float
    shoulders: float
    legs: float
    head: float
    skin: np.ndarray
    hair: np.ndarray
    hair_style: str  # short, long, bald, cap, hood
    upper: Cloth
    hem: float  # how far the upper garment hangs below the hips
    sleeves: str  # long, short
    lower: Cloth
    lower_kind: str  # trousers, shorts, skirt
    skirt: float  # length of a skirt
    shoes: Cloth
    hat: Cloth
    bag_kind: str  # none, backpack, handbag
    bag: Cloth
    bag_hand: int  # -1 or 1
    spot: tuple[float, float, float, float]  # across, down, radius, heat of a warm or cold spot on the body


def _cloth(
    rng: np.random.Generator, names: tuple[str, ...], patterns: tuple[str, ...] = ("plain",), warmth: _Point = (0, 1)
) -> Cloth:
    first = names[int(rng.integers(len(names)))]
    other = [name for name in _COLOURS if name != first]
    second = other[int(rng.integers(len(other)))]
    colour, contrast = (
        np.clip(np.array(_COLOURS[name]) * rng.uniform(0.9, 1.1) + rng.normal(0, 0.015, 3), 0, 1) for name in (first, second)
    )
    near = float(rng.uniform(0.12, 0.92))
    same = bool(rng.random() < 0.4)  # a print that near infrared does not see
    return Cloth(
        colour,
        contrast,
        patterns[int(rng.integers(len(patterns)))],
        float(rng.uniform(0.05, 0.1)),
        (near, near if same else float(rng.uniform(0.1, 0.95))),
        float(rng.uniform(*warmth)),
    )


def _pick(rng: np.random.Generator, options: tuple[Any, ...]) -> Any:
    return options[int(rng.integers(len(options)))]


def _random_person(rng: np.random.Generator) -> Person:
    return Person(
        height=float(rng.uniform(0.9, 1.08)),
        build=float(rng.uniform(0.86, 1.22)),
        shoulders=float(rng.uniform(0.9, 1.12)),
        legs=float(rng.uniform(0.45, 0.53)),
        head=float(rng.uniform(0.9, 1.15)),
        skin=np.array(_pick(rng, _SKINS)),
        hair=np.array(_pick(rng, _HAIRS)),
        hair_style=_pick(rng, ("short", "short", "long", "long", "bald", "cap", "hood")),
        upper=_cloth(rng, _UPPER, ("plain", "plain", "plain", *PATTERNS), (0.1, 0.8)),
        hem=float(_pick(rng, (0.0, 0.0, 0.03, 0.06, 0.14, 0.22))),
        sleeves=_pick(rng, ("long", "long", "short")),
        lower=_cloth(rng, _LOWER, ("plain", "plain", "plain", "plain", "bars", "checks"), (0.1, 0.8)),
        lower_kind=_pick(rng, ("trousers", "trousers", "trousers", "shorts", "skirt")),
        skirt=float(rng.uniform(0.16, 0.34)),
        shoes=_cloth(rng, _SHOES, warmth=(0.0, 0.9)),
        hat=_cloth(rng, _HATS, warmth=(0.1, 0.6)),
        bag_kind=_pick(rng, ("none", "none", "backpack", "handbag")),
        bag=_cloth(rng, _BAGS, warmth=(-0.2, 0.1)),
        bag_hand=int(_pick(rng, (-1, 1))),
        spot=(
            float(rng.uniform(-0.06, 0.06)),
            float(rng.uniform(0.22, 0.62)),
            float(rng.uniform(0.022, 0.05)),
            float(_pick(rng, (-0.1, 1.25))),
        ),
    )


@cache
def person(pid: int) -> Person:
    """The person of a pid, the same on every machine."""
    return _random_person(np.random.default_rng([VERSION, 0, pid]))


# -------------------------------------------------------------------------------------------------------------- drawing

_ACROSS = np.arange(WIDTH, dtype=np.float32) + 0.5
_DOWN = np.arange(HEIGHT, dtype=np.float32)[:, None] + 0.5
_Fill = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (x (w,), y (h, 1)) -> (channels, h, w)


class _Canvas:
    """Red, green, blue, near infrared, heat and the share of each pixel that shows the person: (6, HEIGHT, WIDTH)."""

    def __init__(self) -> None:
        self.pixels = np.zeros((6, HEIGHT, WIDTH), dtype=np.float32)

    def _paint(
        self,
        box: tuple[float, float, float, float],
        distance: _Fill,
        fill: np.ndarray | _Fill,
        channels: slice,
        soft: float = 1.0,
    ) -> None:
        """Blend a fill over all pixels of a box (left, top, right, bottom) whose signed distance is negative."""
        left, top = max(0, int(box[0]) - 1), max(0, int(box[1]) - 1)
        right, bottom = min(WIDTH, int(box[2]) + 2), min(HEIGHT, int(box[3]) + 2)
        if left >= right or top >= bottom:
            return
        x, y = _ACROSS[left:right], _DOWN[top:bottom]
        alpha = distance(x, y)
        alpha *= -1 / soft
        alpha += 0.5
        np.minimum(np.maximum(alpha, 0, out=alpha), 1, out=alpha)
        values = fill(x, y) if callable(fill) else fill[:, None, None]
        there = self.pixels[channels, top:bottom, left:right]
        there += alpha * (values - there)

    def polygon(self, points: list[_Point], fill: np.ndarray | _Fill, channels: slice = _EVERYTHING, grow: float = 0.0) -> None:
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
        self, a: _Point, b: _Point, radius: float, end: float, fill: np.ndarray | _Fill, channels: slice = _EVERYTHING
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
        centre: _Point,
        half: _Point,
        fill: np.ndarray | _Fill,
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

    def box(self, left: float, top: float, right: float, bottom: float, fill: np.ndarray | _Fill, grow: float = 0.0) -> None:
        def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            across = np.maximum(left - x, x - right)
            return np.maximum(across, np.maximum(top - y, y - bottom)) - grow

        self._paint((left - grow, top - grow, right + grow, bottom + grow), distance, fill, _EVERYTHING)


def _values(colour: np.ndarray, near: float, heat: float, mask: float) -> np.ndarray:
    return np.array([*colour, near, heat, mask], dtype=np.float32)


_AIR, _SKIN_HEAT = 0.3, 0.95  # heat of cold cloth and of bare skin


def _pattern(cloth: Cloth, u: np.ndarray, v: np.ndarray) -> np.ndarray | float:
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


@dataclass(frozen=True)
class Pose:
    """Where a body stands in the picture and how: `size` pixels high, its feet at `feet`, leaning by `lean`."""

    view: str
    phase: float  # of the walk, in radians
    size: float
    centre: float
    feet: float
    lean: float


_STRETCH = 1.22  # boxes of people are 1:2, which shows them wider than they are


class _Body:
    """Paints a person in a pose. Body coordinates: u across, v from 0 (crown) to 1 (soles), shares of the body's height."""

    def __init__(self, canvas: _Canvas, who: Person, pose: Pose, mask: float) -> None:
        self.canvas, self.who, self.pose, self.mask = canvas, who, pose, mask
        self.side = pose.view in ("left", "right")
        self.turn = -1.0 if pose.view in ("left", "back") else 1.0  # what is at the person's left changes sides
        self.size = pose.size * who.height

    def at(self, u: float, v: float) -> _Point:
        u = u * self.turn
        return (
            self.pose.centre + self.size * _STRETCH * (u + self.pose.lean * (v - 0.5)),
            self.pose.feet + self.size * (v - 1),
        )

    def length(self, share: float) -> float:
        return share * self.size * (1 + _STRETCH) / 2

    def cloth(self, cloth: Cloth, shade: float = 1.0) -> np.ndarray | _Fill:
        heat = _AIR + (_SKIN_HEAT - _AIR) * cloth.warmth
        first = _values(cloth.colour * shade, cloth.near[0] * shade, heat, self.mask)
        if cloth.pattern == "plain" or (cloth.pattern == "logo" and self.pose.view == "back"):
            return first
        step = _values(cloth.second * shade, cloth.near[1] * shade, heat, self.mask) - first

        def fill(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            v = (y - self.pose.feet) / self.size + 1
            u = (x - self.pose.centre) / (self.size * _STRETCH) - self.pose.lean * (v - 0.5)
            return first[:, None, None] + step[:, None, None] * _pattern(cloth, u * self.turn, v)

        return fill

    def bare(self, shade: float = 1.0) -> np.ndarray:
        return _values(self.who.skin * shade, 0.72 * shade, _SKIN_HEAT, self.mask)

    def limb(self, points: list[_Point], radii: list[float], covered: float, cover: Cloth, shade: float) -> None:
        """Two bones from joint to joint, the first `covered` of them (0..2) under cloth, the rest bare."""
        bones = list(zip(points, points[1:], radii, radii[1:], strict=False))
        for bone, (a, b, start, end) in reversed(list(enumerate(bones))):
            share = min(1.0, max(0.0, covered - bone))
            ends = (self.at(*a), self.at(*b), self.length(start), self.length(end))
            if share < 1:
                self.canvas.capsule(ends[0], ends[1], ends[2] * 0.85, ends[3] * 0.85, self.bare(shade))
            if share > 0:
                until = (ends[0][0] + (ends[1][0] - ends[0][0]) * share, ends[0][1] + (ends[1][1] - ends[0][1]) * share)
                self.canvas.capsule(ends[0], until, ends[2], ends[2] + (ends[3] - ends[2]) * share, self.cloth(cover, shade))

    def leg(self, which: int, shade: float) -> None:
        who = self.who
        hip = 1 - who.legs
        swing = math.sin(self.pose.phase) * which
        if self.side:
            knee, foot, lift = 0.07 * swing, 0.15 * swing, 0.03 * max(0.0, -swing)
            start = 0.01 * which
            toe = 0.07
        else:
            start = 0.052 * who.build * which
            knee, foot, lift = start * 1.15, start * 1.25, 0.025 * max(0.0, swing)
            toe = 0.022 * which
        joints = [(start, hip), (knee + (0.03 if self.side and swing < 0 else 0), hip + who.legs * 0.5), (foot, 0.965 - lift)]
        thick = who.build * (1.12 if self.side else 1.0)
        covered = {"trousers": 2.0, "shorts": 0.95, "skirt": 0.0}[who.lower_kind]
        self.limb(joints, [0.062 * thick, 0.047 * thick, 0.038 * thick], covered, who.lower, shade)
        heel = self.at(foot, 0.975 - lift)
        self.canvas.capsule(
            heel, self.at(foot + toe, 0.982 - lift), self.length(0.026), self.length(0.02), self.cloth(who.shoes)
        )

    def arm(self, which: int, shade: float) -> None:
        who = self.who
        swing = -math.sin(self.pose.phase) * which
        top = self.shoulder + 0.03
        if self.side:
            joints = [(0.0, top), (0.055 * swing - 0.01, top + 0.155), (0.12 * swing + 0.03, top + 0.29)]
        else:
            start = self.broad * which
            joints = [
                (start, top),
                (start + 0.03 * which, top + 0.155),
                (start + (0.022 + 0.012 * swing) * which, top + 0.3 - 0.02 * abs(swing)),
            ]
        thick = 0.9 + 0.1 * who.build
        hand = joints[-1]
        self.canvas.ellipse(self.at(hand[0], hand[1] + 0.01), (self.length(0.024), self.length(0.027)), self.bare(shade))
        covered = 2.0 if who.sleeves == "long" else 0.7
        self.limb(joints, [0.041 * thick, 0.036 * thick, 0.029 * thick], covered, who.upper, shade)
        if who.bag_kind == "handbag" and which == who.bag_hand:
            u, v = hand
            self.canvas.capsule(self.at(u - 0.03, v + 0.07), self.at(u, v), 1.0, 1.0, self.cloth(who.bag, 0.7))
            self.canvas.capsule(self.at(u + 0.03, v + 0.07), self.at(u, v), 1.0, 1.0, self.cloth(who.bag, 0.7))
            self.rectangle(u - 0.055, v + 0.06, u + 0.055, v + 0.15, self.cloth(who.bag))

    def rectangle(
        self, left: float, top: float, right: float, bottom: float, fill: np.ndarray | _Fill, grow: float = 0.8
    ) -> None:
        self.trapezoid(top, left, right, bottom, left, right, fill, grow)

    def trapezoid(
        self,
        top: float,
        left: float,
        right: float,
        bottom: float,
        low_left: float,
        low_right: float,
        fill: np.ndarray | _Fill,
        grow: float = 0.8,
    ) -> None:
        points = [self.at(left, top), self.at(right, top), self.at(low_right, bottom), self.at(low_left, bottom)]
        self.canvas.polygon(points if self.turn > 0 else points[::-1], fill, grow=grow)

    def torso(self) -> None:
        who = self.who
        hip = 1 - who.legs
        narrow = 0.7 if self.side else 1.0
        waist, hips = 0.088 * who.build * narrow, 0.104 * who.build * narrow
        if who.lower_kind == "skirt":
            flare = hips * 1.1 + who.skirt * 0.12
            self.trapezoid(hip - 0.06, -hips, hips, hip + who.skirt, -flare, flare, self.cloth(who.lower))
        else:
            self.trapezoid(hip - 0.06, -hips, hips, hip + 0.05, -hips, hips, self.cloth(who.lower))
        fill = self.cloth(who.upper)
        broad = self.broad * (0.72 if self.side else 1.0)
        middle = (self.shoulder + hip) / 2 + 0.03
        self.trapezoid(self.shoulder + 0.02, -broad, broad, middle, -waist, waist, fill)
        flare = hips * 1.06 + who.hem * 0.14
        self.trapezoid(middle, -waist, waist, hip + who.hem, -flare, flare, fill)
        round_ = 0.032
        self.canvas.capsule(
            self.at(-broad + round_, self.shoulder + 0.02),
            self.at(broad - round_, self.shoulder + 0.02),
            self.length(round_),
            self.length(round_),
            fill,
        )
        u, v, radius, heat = who.spot
        spot = np.array([heat], dtype=np.float32)
        size = self.length(radius)
        self.canvas.ellipse(self.at(u * (0.6 if self.side else 1), v), (size, size), spot, _ONLY_HEAT, soft=3.0)

    def backpack(self) -> None:
        fill = self.cloth(self.who.bag)
        top, bottom = self.shoulder + 0.02, self.shoulder + 0.27
        if self.pose.view == "back":
            self.rectangle(-0.085, top, 0.085, bottom, fill, grow=2.0)
            self.rectangle(-0.05, bottom - 0.1, 0.05, bottom - 0.03, self.cloth(self.who.bag, 0.75))
        elif self.pose.view == "front":
            for across in (-0.07, 0.07):
                self.canvas.capsule(self.at(across, self.shoulder), self.at(across, self.shoulder + 0.2), 1.4, 1.2, fill)
        else:
            self.rectangle(-0.17, top, -0.06, bottom, fill, grow=1.5)

    def hair(self) -> np.ndarray:
        return _values(self.who.hair, 0.25 + 0.5 * float(self.who.hair.mean()), 0.62, self.mask)

    def long_hair(self) -> None:
        if self.who.hair_style == "long":
            radius = 0.066 * self.who.head
            middle = self.at(-0.018 if self.side else 0, radius * 1.6)
            half = (self.length(radius) * (0.9 if self.side else 1.12), self.length(radius) * 1.6)
            self.canvas.ellipse(middle, half, self.hair())

    def head(self) -> None:
        who = self.who
        radius = 0.066 * who.head
        wide, high = self.length(radius * 0.86), self.length(radius)
        hair = self.hair()
        u = 0.012 if self.side else 0.0
        self.canvas.capsule(
            self.at(0, radius * 1.5), self.at(0, self.shoulder + 0.01), wide * 0.5, wide * 0.55, self.bare(0.85)
        )
        centre = self.at(u, radius)
        if self.pose.view != "front":
            self.long_hair()
        cover = hair if who.hair_style != "hood" else self.cloth(who.hat)
        bald = who.hair_style == "bald"
        if self.pose.view == "back" and not bald:
            self.canvas.ellipse(centre, (wide * 1.05, high * 1.03), cover)
        else:
            self.canvas.ellipse(centre, (wide, high), self.bare())
            if not bald:
                back = self.at(u - (0.03 if self.side else 0), radius * 0.62)
                self.canvas.ellipse(back, (wide * 1.04, high * 0.72), cover)
                if who.hair_style == "hood":
                    self.canvas.ellipse(self.at(u - 0.035 if self.side else 0, radius), (wide * 1.25, high * 1.18), cover)
                face = self.at(u + (0.02 if self.side else 0), radius * 1.2)
                self.canvas.ellipse(face, (wide * 0.78, high * 0.66), self.bare())
            if self.side:
                self.canvas.ellipse(self.at(u + radius * 0.8, radius * 1.1), (1.3, 1.5), self.bare())
            else:
                for eye in (-0.36, 0.36):
                    dark = np.array([0.1, 0.08, 0.08, 0.3], dtype=np.float32)
                    self.canvas.ellipse(self.at(eye * radius, radius * 1.0), (0.9, 0.7), dark, _LIGHT)
        if who.hair_style == "cap":
            fill = self.cloth(who.hat)
            self.canvas.ellipse(self.at(u, radius * 0.5), (wide * 1.1, high * 0.62), fill)
            if self.side:
                self.canvas.capsule(self.at(u, radius * 0.8), self.at(u + radius * 1.6, radius * 0.85), 1.5, 1.0, fill)
            elif self.pose.view == "front":
                self.canvas.capsule(self.at(-radius * 0.8, radius * 0.82), self.at(radius * 0.8, radius * 0.82), 1.4, 1.4, fill)

    def draw(self) -> None:
        who = self.who
        self.shoulder = 0.066 * who.head * 2 + 0.028
        self.broad = 0.118 * who.shoulders * (0.5 + 0.5 * who.build)
        far, near = (-1, 1) if self.turn > 0 else (1, -1)
        packed = who.bag_kind == "backpack"
        if self.side:
            self.arm(far, 0.72)
        self.leg(far, 0.8 if self.side else 0.95)
        self.leg(near, 1.0)
        if packed and self.side:
            self.backpack()
        if self.pose.view == "front":  # the body stands before it
            self.long_hair()
        self.torso()
        if packed and not self.side:
            self.backpack()
        self.head()
        if not self.side:
            self.arm(far, 0.88)
        self.arm(near, 0.88)


# ----------------------------------------------------------------------------------------------------------- background


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


def _texture(rng: np.random.Generator, layer: int) -> np.ndarray:
    top, left = int(rng.integers(256 - HEIGHT)), int(rng.integers(256 - WIDTH))
    return _noise()[layer, top : top + HEIGHT, left : left + WIDTH]


def _stuff(
    rng: np.random.Generator, colour: tuple[float, float, float], spread: float, near: _Point, heat: _Point
) -> np.ndarray:
    return _values(
        np.clip(np.array(colour) + rng.normal(0, spread / 2, 3) + rng.normal(0, spread), 0, 1),
        rng.uniform(*near),
        rng.uniform(*heat),
        0,
    )


def _any_colour(rng: np.random.Generator) -> tuple[float, float, float]:
    return _COLOURS[_pick(rng, tuple(_COLOURS))]


def _ground(rng: np.random.Generator, canvas: _Canvas, wall: np.ndarray, floor: np.ndarray) -> float:
    """Wall above, floor below; the height at which they meet."""
    meet = float(rng.uniform(68, 104))
    canvas.pixels[:, :, :] = wall[:, None, None]
    tilt = float(rng.uniform(-5, 5))
    canvas.polygon([(-2, meet), (WIDTH + 2, meet + tilt), (WIDTH + 2, HEIGHT + 2), (-2, HEIGHT + 2)], floor)
    return meet


def _street(rng: np.random.Generator, canvas: _Canvas) -> None:
    """A wall with windows and a door, a pavement, poles."""
    brick = _pick(rng, ((0.62, 0.36, 0.28), (0.7, 0.66, 0.58), (0.5, 0.5, 0.52)))
    meet = _ground(
        rng,
        canvas,
        _stuff(rng, brick, 0.06, (0.35, 0.7), (0.3, 0.5)),
        _stuff(rng, (0.5, 0.5, 0.5), 0.06, (0.3, 0.5), (0.25, 0.45)),
    )
    wide, high = rng.uniform(11, 19), rng.uniform(16, 26)
    offset, gap = rng.uniform(-15, 0), rng.uniform(4, 10)
    for row in range(3):
        top = 3 + row * (high + gap + 3)
        for column in range(4):
            left = offset + column * (wide + gap)
            if top + high < meet and rng.random() < 0.8:
                lit = rng.random() < 0.25
                glass = _stuff(
                    rng, (0.9, 0.82, 0.5) if lit else (0.2, 0.26, 0.33), 0.06, (0.05, 0.4), (0.55, 0.9) if lit else (0.05, 0.35)
                )
                canvas.box(left, top, left + wide, top + high, glass)
    if rng.random() < 0.5:
        left = rng.uniform(-5, 55)
        canvas.box(left, meet - 45, left + 18, meet, _stuff(rng, _any_colour(rng), 0.05, (0.1, 0.9), (0.2, 0.7)))
    for _ in range(int(rng.integers(1, 4))):
        x = rng.uniform(0, WIDTH)
        fill = _stuff(rng, (0.3, 0.3, 0.32), 0.1, (0.1, 0.8), (0.1, 0.6))
        canvas.capsule((x, -5), (x + rng.uniform(-2, 2), meet + rng.uniform(0, 20)), 2.0, 2.4, fill)
        if rng.random() < 0.5:
            canvas.ellipse((x, rng.uniform(5, 30)), (5, 4), _stuff(rng, (0.95, 0.9, 0.7), 0.03, (0.8, 1), (0.8, 1.1)))


def _park(rng: np.random.Generator, canvas: _Canvas) -> None:
    """Sky, grass, bushes and trunks."""
    meet = _ground(
        rng,
        canvas,
        _stuff(rng, (0.66, 0.78, 0.9), 0.06, (0.1, 0.4), (0.0, 0.15)),
        _stuff(rng, (0.34, 0.48, 0.2), 0.07, (0.6, 0.85), (0.25, 0.45)),
    )
    for _ in range(int(rng.integers(2, 5))):
        x = rng.uniform(-4, WIDTH + 4)
        trunk = _stuff(rng, (0.32, 0.24, 0.16), 0.05, (0.2, 0.6), (0.3, 0.6))
        canvas.capsule((x, -5), (x + rng.uniform(-6, 6), meet + 5), rng.uniform(2, 4), rng.uniform(2.5, 5), trunk)
    for _ in range(int(rng.integers(9, 16))):
        leaf = _stuff(rng, (0.2, 0.38, 0.14), 0.09, (0.55, 0.98), (0.2, 0.5))
        where = (rng.uniform(-5, WIDTH + 5), rng.uniform(-5, meet + 12))
        canvas.ellipse(where, (rng.uniform(6, 17), rng.uniform(5, 14)), leaf, soft=3.0)
    if rng.random() < 0.5:  # a bench
        x, y = rng.uniform(-10, 50), meet + rng.uniform(0, 10)
        wood = _stuff(rng, _any_colour(rng), 0.06, (0.2, 0.8), (0.3, 0.75))
        canvas.box(x, y, x + 24, y + 4, wood)
        canvas.box(x + 2, y, x + 4, y + 14, wood)
        canvas.box(x + 20, y, x + 22, y + 14, wood)


def _car_park(rng: np.random.Generator, canvas: _Canvas) -> None:
    """Asphalt with lines, parked cars with warm engines, lamps."""
    meet = _ground(
        rng,
        canvas,
        _stuff(rng, (0.55, 0.58, 0.6), 0.1, (0.2, 0.6), (0.05, 0.35)),
        _stuff(rng, (0.28, 0.28, 0.3), 0.05, (0.15, 0.4), (0.3, 0.55)),
    )
    for _ in range(3):
        x = rng.uniform(-10, WIDTH)
        line = _stuff(rng, (0.85, 0.85, 0.8), 0.04, (0.6, 0.9), (0.3, 0.5))
        canvas.polygon([(x, meet + 8), (x + 3, meet + 8), (x + 12, HEIGHT + 2), (x + 6, HEIGHT + 2)], line)
    for _ in range(int(rng.integers(2, 5))):
        x, y, long = rng.uniform(-25, 50), meet + rng.uniform(-22, 8), rng.uniform(26, 44)
        paint = _stuff(rng, _any_colour(rng), 0.05, (0.1, 0.95), (0.2, 0.5))
        canvas.box(
            x + long * 0.2, y - 12, x + long * 0.75, y, _stuff(rng, (0.2, 0.25, 0.3), 0.05, (0.05, 0.3), (0.05, 0.3)), grow=2
        )
        canvas.box(x, y, x + long, y + 13, paint, grow=2)
        if rng.random() < 0.6:  # just parked
            heat = np.array([rng.uniform(0.7, 1.15)], dtype=np.float32)
            canvas.ellipse((x + long * 0.15, y + 5), (7, 6), heat, _ONLY_HEAT, soft=4.0)
        for wheel in (0.2, 0.8):
            tyre = _stuff(rng, (0.07, 0.07, 0.07), 0.02, (0.05, 0.2), (0.3, 0.8))
            canvas.ellipse((x + long * wheel, y + 14), (5, 5), tyre)
    for _ in range(int(rng.integers(1, 3))):
        x = rng.uniform(0, WIDTH)
        post = _stuff(rng, (0.6, 0.6, 0.6), 0.1, (0.3, 0.8), (0.1, 0.4))
        canvas.capsule((x, 8), (x, meet), 1.2, 1.8, post)
        canvas.ellipse((x, 8), (6, 3), _stuff(rng, (1, 0.95, 0.8), 0.03, (0.8, 1), (0.8, 1.15)))


def _hall(rng: np.random.Generator, canvas: _Canvas) -> None:
    """A shop front: panels, coloured posters, tiles, radiators, goods on shelves."""
    meet = _ground(
        rng,
        canvas,
        _stuff(rng, (0.78, 0.74, 0.68), 0.08, (0.5, 0.9), (0.35, 0.55)),
        _stuff(rng, (0.6, 0.56, 0.5), 0.07, (0.3, 0.7), (0.3, 0.5)),
    )
    for _ in range(int(rng.integers(3, 6))):
        left, top = rng.uniform(-12, 58), rng.uniform(-6, meet - 24)
        right, bottom = left + rng.uniform(8, 20), top + rng.uniform(12, 34)
        canvas.box(left, top, right, min(meet, bottom), _stuff(rng, _any_colour(rng), 0.06, (0.1, 0.95), (0.25, 0.6)))
        canvas.box(left + 2, top + 3, right - 2, top + 7, _stuff(rng, _any_colour(rng), 0.06, (0.1, 0.95), (0.25, 0.6)))
    shelf = rng.uniform(25, meet - 10)
    for x in np.arange(rng.uniform(-6, 0), WIDTH, rng.uniform(7, 12)):
        goods = _stuff(rng, _any_colour(rng), 0.06, (0.1, 0.95), (0.15, 0.6))
        canvas.box(x, shelf - rng.uniform(5, 12), x + rng.uniform(4, 7), shelf, goods)
    canvas.box(-2, shelf, WIDTH + 2, shelf + 2, _stuff(rng, (0.4, 0.3, 0.2), 0.06, (0.3, 0.7), (0.3, 0.5)))
    if rng.random() < 0.5:  # a radiator
        x = rng.uniform(-8, 52)
        canvas.box(x, meet - 16, x + 20, meet - 1, _stuff(rng, (0.9, 0.9, 0.88), 0.03, (0.6, 0.9), (0.8, 1.1)))
    for x in np.arange(rng.uniform(-10, 0), WIDTH + 20, 14):
        line = _stuff(rng, (0.4, 0.38, 0.35), 0.03, (0.2, 0.5), (0.3, 0.45))
        canvas.capsule((x, meet), (32 + (x - 32) * 2, HEIGHT + 2), 0.4, 0.7, line)


# --------------------------------------------------------------------------------------------------------------- shots


@dataclass(frozen=True)
class Camera:
    """What a camera does to all it sees."""

    background: Callable[[np.random.Generator, _Canvas], None]
    cast: tuple[float, float, float]  # gain of red, green, blue
    contrast: float
    blur: float  # share of a pixel's light that goes to each neighbour
    size: _Point  # height of an average person, from and to, in pixels
    lean: float
    near_gain: float
    heat_gain: float
    shift: tuple[tuple[int, int], tuple[int, int]]  # of near infrared and thermal against RGB (down, across), at most 1 pixel


CAMERA: tuple[Camera, ...] = (
    Camera(_street, (1.06, 1.0, 0.92), 1.05, 0.06, (96, 110), 0.03, 1.0, 1.0, ((0, 0), (0, 0))),
    Camera(_park, (0.92, 1.02, 1.0), 0.85, 0.16, (88, 102), -0.05, 0.85, 0.9, ((0, 1), (0, 0))),
    Camera(_car_park, (0.88, 0.96, 1.14), 1.15, 0.1, (92, 108), 0.06, 1.1, 1.1, ((0, 0), (1, 0))),
    Camera(_hall, (1.14, 1.0, 0.8), 0.95, 0.2, (100, 114), -0.02, 0.95, 0.85, ((0, 0), (0, -1))),
)

RGB_BAD, NI_BAD, TI_BAD = 0.30, 0.15, 0.20  # share of the shots in which a modality shows (nearly) nothing


@dataclass(frozen=True)
class Light:
    """What spoils which modality of a shot ("" for nothing). Never all three at once."""

    rgb: str  # night, glare
    near: str  # flash
    heat: str  # hot day

    @property
    def bad(self) -> dict[str, bool]:
        return {"RGB": bool(self.rgb), "NI": bool(self.near), "TI": bool(self.heat)}


@dataclass(frozen=True)
class Drawing:
    """A shot: the three pictures, the light, where the person is, and where they would be if nothing stood before them."""

    images: dict[str, np.ndarray]  # RGB (HEIGHT, WIDTH, 3), NI and TI (HEIGHT, WIDTH), uint8
    light: Light
    visible: np.ndarray  # (HEIGHT, WIDTH), 0..1
    whole: np.ndarray  # (HEIGHT, WIDTH), 0..1


def _light(rng: np.random.Generator) -> Light:
    while True:
        chance = rng.random(4)
        rgb = ("night" if chance[3] < 0.65 else "glare") if chance[0] < RGB_BAD else ""
        light = Light(rgb, "flash" if chance[1] < NI_BAD else "", "hot day" if chance[2] < TI_BAD else "")
        if not all(light.bad.values()):
            return light


def _pose(rng: np.random.Generator, camera: Camera) -> Pose:
    return Pose(
        view=_pick(rng, VIEWS),
        phase=float(rng.uniform(0, 2 * math.pi)),
        size=float(rng.uniform(*camera.size)),
        centre=WIDTH / 2 + float(np.clip(rng.normal(0, 4), -8, 8)),
        feet=float(rng.uniform(115, 126)),
        lean=camera.lean + float(rng.normal(0, 0.02)),
    )


_MOST_HIDDEN = 0.25  # share of the person that others may hide


def _hide(rng: np.random.Generator, canvas: _Canvas, camera: Camera, pose: Pose) -> None:
    """A pole, a box or a passer-by before the person, taken back where it would hide more than a quarter."""
    before = canvas.pixels.copy()
    kind = _pick(rng, ("pole", "box", "passer-by"))
    side = _pick(rng, (-1, 1))
    if kind == "pole":
        x, wide = pose.centre + rng.uniform(-16, 16), rng.uniform(2, 3.2)
        fill = _stuff(rng, (0.4, 0.4, 0.42), 0.12, (0.1, 0.8), (0.1, 0.6))
        canvas.capsule((x, -6), (x + rng.uniform(-3, 3), HEIGHT + 6), wide, wide, fill)
    elif kind == "box":
        x, top = pose.centre + side * rng.uniform(4, 18), rng.uniform(88, 104)
        fill = _stuff(rng, _any_colour(rng), 0.06, (0.1, 0.9), (0.1, 0.7))
        canvas.box(x - 16, top, x + 16, HEIGHT + 4, fill, grow=1)
    else:
        other = Pose(
            _pick(rng, VIEWS), rng.uniform(0, 6), rng.uniform(*camera.size), pose.centre + side * rng.uniform(23, 32), 130, 0
        )
        _Body(canvas, _random_person(rng), other, 0.0).draw()
    if canvas.pixels[_MASK].sum() < (1 - _MOST_HIDDEN) * before[_MASK].sum():
        canvas.pixels = before


def _blurred(pixels: np.ndarray, share: float) -> np.ndarray:
    """Each pixel gives a share of its light to each of its four neighbours, along and across: (..., h, w)."""
    for axis in (-2, -1):
        along = np.moveaxis(pixels, axis, 0)
        mixed = along * (1 - 2 * share)
        light = along * share
        mixed[1:] += light[:-1]
        mixed[:-1] += light[1:]
        mixed[0] += light[0]
        mixed[-1] += light[-1]
        pixels = np.moveaxis(mixed, 0, axis)
    return pixels


def _shifted(plane: np.ndarray, down: int, across: int) -> np.ndarray:
    if not down and not across:
        return plane
    padded = np.pad(plane, 1, mode="edge")
    return padded[1 - down : 1 - down + HEIGHT, 1 - across : 1 - across + WIDTH]


def _bytes(values: np.ndarray) -> np.ndarray:
    return (np.clip(values, 0, 1) * 255 + 0.5).astype(np.uint8)


def _glare(rng: np.random.Generator) -> np.ndarray:
    """Light that floods a picture, most around one place: (HEIGHT, WIDTH), 0..1."""
    x, y = rng.uniform(10, WIDTH - 10), rng.uniform(15, HEIGHT - 30)
    return np.exp(-((_ACROSS - x) ** 2 + (_DOWN - y) ** 2 * 0.4) / (2 * 42.0**2))


def draw(pid: int, camera: int, shot: int) -> Drawing:
    """One shot of a person by a camera (from 0), in all three modalities."""
    eye = CAMERA[camera]
    rng = np.random.default_rng([VERSION, 1, pid, camera, shot])
    light, pose = _light(rng), _pose(rng, eye)

    canvas = _Canvas()
    eye.background(rng, canvas)
    if rng.random() < 0.25:  # somebody behind
        other = Pose(
            _pick(rng, VIEWS), rng.uniform(0, 6), rng.uniform(70, 100), rng.uniform(0, WIDTH), rng.uniform(100, 118), 0
        )
        _Body(canvas, _random_person(rng), other, 0.0).draw()
    pixels = canvas.pixels
    grain = _texture(rng, 1) * 0.05 + _texture(rng, 0) * 0.05
    pixels[:4] *= 1 + grain
    pixels[_HEAT] += _texture(rng, 0) * 0.04
    shadow = np.array([0.12, 0.12, 0.12, 0.1], dtype=np.float32)
    canvas.ellipse((pose.centre, pose.feet - 1), (18, 3), shadow, _LIGHT, soft=4.0)

    _Body(canvas, person(pid), pose, 1.0).draw()
    whole = canvas.pixels[_MASK].copy()
    if rng.random() < 0.35:
        _hide(rng, canvas, eye, pose)
    visible = canvas.pixels[_MASK].copy()

    pixels = canvas.pixels[:5]
    pixels[:4] *= 1 + _texture(rng, 0) * 0.05 + (_ACROSS / WIDTH - 0.5) * float(rng.normal(0, 0.25))  # light from one side
    pixels = _blurred(pixels, eye.blur)
    noise = rng.standard_normal(pixels.shape, dtype=np.float32)

    colour = ((pixels[:3] - 0.4) * eye.contrast + 0.4) * (np.array(eye.cast) * rng.normal(1, 0.04, 3) * rng.uniform(0.75, 1.1))[
        :, None, None
    ].astype(np.float32)
    if light.rgb == "night":
        colour = np.maximum(colour, 0) * rng.uniform(0.02, 0.07) + 0.02 + noise[:3] * 0.028
    elif light.rgb == "glare":
        veil = 0.86 + 0.12 * _glare(rng)
        colour = colour * (1 - veil) + veil + noise[:3] * 0.02
    else:
        colour = colour + noise[:3] * 0.015

    near = (pixels[_NEAR] - 0.5) * eye.near_gain * rng.uniform(0.8, 1.1) + 0.48 + rng.normal(0, 0.04)
    if light.near == "flash":
        veil = 0.82 + 0.16 * _glare(rng)
        near = near * (1 - veil) + veil
    near = near + noise[_NEAR] * 0.025

    heat = _blurred(pixels[_HEAT], 0.25)
    if light.heat == "hot day":  # everything is as warm as a body
        heat = 0.62 + (heat - 0.5) * rng.uniform(0.06, 0.12) + _blurred(_texture(rng, 1), 0.2) * 0.03
    heat = (heat - 0.5) * eye.heat_gain * rng.uniform(0.8, 1.1) + 0.48 + rng.normal(0, 0.04) + noise[_HEAT] * 0.015

    near_shift, heat_shift = eye.shift
    images = {
        "RGB": np.ascontiguousarray(_bytes(colour).transpose(1, 2, 0)),
        "NI": np.ascontiguousarray(_shifted(_bytes(near), *near_shift)),
        "TI": np.ascontiguousarray(_shifted(_bytes(heat), *heat_shift)),
    }
    return Drawing(images, light, visible, whole)


# --------------------------------------------------------------------------------------------------------------- files


def _parts(name: str) -> dict[str, Part]:
    if name not in DATASETS:
        raise UserError(f"no drawn data set {name!r}; there are: {', '.join(DATASETS)}.{did_you_mean(name, DATASETS)}")
    return DATASETS[name]


def file_name(pid: int, camera: int, shot: int) -> str:
    """A file's name as in RGBNT201: the pid in 6 digits, the camera (counted from 1) as the 4th character of the 2nd field."""
    return f"{pid:06d}_cam{camera + 1}_0_{shot:02d}.jpg"


def shots(part: Part) -> Iterator[tuple[int, int, int]]:
    """(pid, camera, shot) of all pictures of a split."""
    return ((pid, camera, shot) for pid in part.pids for camera in range(CAMERAS) for shot in range(part.shots))


def write(root: Path, name: str) -> None:
    """Draw a data set into root/{train_171,test}/{RGB,NI,TI}/*.jpg, and last a manifest of what is there."""
    from tqdm import tqdm

    parts = _parts(name)
    total = sum(part.identities * part.shots * CAMERAS for part in parts.values())
    with tqdm(total=total, desc=f"drawing {name} (once)", unit="shot", leave=False, mininterval=1) as bar:
        for split, part in parts.items():
            for modality in MODALITIES:
                (root / split / modality).mkdir(parents=True, exist_ok=True)
            for pid, camera, shot in shots(part):
                for modality, pixels in draw(pid, camera, shot).images.items():
                    Image.fromarray(pixels).save(root / split / modality / file_name(pid, camera, shot), quality=QUALITY)
                bar.update()
    (root / MANIFEST).write_text(json.dumps(_manifest(name), indent=1))


def _manifest(name: str) -> dict[str, Any]:
    counts = {split: part.identities * part.shots * CAMERAS for split, part in _parts(name).items()}
    return {"name": name, "version": VERSION, "shots": counts}


def is_drawing(folder: Path, name: str) -> bool:
    """Whether a folder was written as this version's drawing, whatever has become of its files."""
    try:
        return bool(json.loads((folder / MANIFEST).read_text()) == _manifest(name))
    except (OSError, ValueError):
        return False


def _is_whole(folder: Path, name: str) -> bool:
    """Whether a folder holds this version's drawing, no file missing."""
    try:
        return is_drawing(folder, name) and all(
            sum(file.endswith(".jpg") for file in os.listdir(folder / split / modality)) == count
            for split, count in _manifest(name)["shots"].items()
            for modality in MODALITIES
        )
    except (OSError, ValueError):
        return False


def cache_folder() -> Path:
    """Where drawn files are kept: $TOKENSIEVE_CACHE, else tokensieve under the user's cache folder."""
    if os.environ.get("TOKENSIEVE_CACHE"):
        return Path(os.environ["TOKENSIEVE_CACHE"]).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokensieve"
    except RuntimeError as error:
        raise UserError("this user has no home folder: set TOKENSIEVE_CACHE to a folder that can be written") from error


def folder(name: str, root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of a drawn data set (under `root`, else the cache folder), drawn on first use, whole or not at all.

    Its name ends in the version, so that another version's drawing stays whole for whoever reads it.
    """
    _parts(name)
    parent = Path(root) if root is not None else cache_folder()
    final = parent / f"{name}-v{VERSION}"
    if _is_whole(final, name):
        return final
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent, f".{final.name}-")
        with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=parent, ignore_cleanup_errors=True) as scratch:
            drawn = Path(scratch) / "new"
            write(drawn, name)
            if not _is_whole(final, name):  # no other process was faster
                if final.exists():  # files are missing
                    os.rename(final, Path(scratch) / "old")
                os.rename(drawn, final)
    except OSError as error:
        if not _is_whole(final, name):  # another process was faster by a hair
            raise UserError(
                f"cannot write the drawn data set {name} to {final} ({error.strerror or error}): "
                f"{'choose' if root is not None else 'set TOKENSIEVE_CACHE to'} a folder that can be written"
            ) from error
    return final


def _sweep(parent: Path, prefix: str) -> None:
    """Remove what drawings that were killed more than a day ago have left."""
    for left in parent.glob(f"{prefix}*"):
        if time.time() - left.stat().st_mtime > 24 * 3600:
            shutil.rmtree(left, ignore_errors=True)
