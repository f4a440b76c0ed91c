"""Who a person is: body, clothes, colours and what the cloth does in near infrared and to heat."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

VERSION = 1  # of the drawing: to be raised whenever a picture changes
Point = tuple[float, float]
CLOTH_COLOURS: dict[str, tuple[float, float, float]] = {
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
    near: Point  # of colour and second: dyes differ in infrared whatever their colour
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
    rng: np.random.Generator, names: tuple[str, ...], patterns: tuple[str, ...] = ("plain",), warmth: Point = (0, 1)
) -> Cloth:
    first = names[int(rng.integers(len(names)))]
    other = [name for name in CLOTH_COLOURS if name != first]
    second = other[int(rng.integers(len(other)))]
    colour, contrast = (
        np.clip(np.array(CLOTH_COLOURS[name]) * rng.uniform(0.9, 1.1) + rng.normal(0, 0.015, 3), 0, 1)
        for name in (first, second)
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


def pick(rng: np.random.Generator, options: tuple[Any, ...]) -> Any:
    return options[int(rng.integers(len(options)))]


def random_person(rng: np.random.Generator) -> Person:
    return Person(
        height=float(rng.uniform(0.9, 1.08)),
        build=float(rng.uniform(0.86, 1.22)),
        shoulders=float(rng.uniform(0.9, 1.12)),
        legs=float(rng.uniform(0.45, 0.53)),
        head=float(rng.uniform(0.9, 1.15)),
        skin=np.array(pick(rng, _SKINS)),
        hair=np.array(pick(rng, _HAIRS)),
        hair_style=pick(rng, ("short", "short", "long", "long", "bald", "cap", "hood")),
        upper=_cloth(rng, _UPPER, ("plain", "plain", "plain", *PATTERNS), (0.1, 0.8)),
        hem=float(pick(rng, (0.0, 0.0, 0.03, 0.06, 0.14, 0.22))),
        sleeves=pick(rng, ("long", "long", "short")),
        lower=_cloth(rng, _LOWER, ("plain", "plain", "plain", "plain", "bars", "checks"), (0.1, 0.8)),
        lower_kind=pick(rng, ("trousers", "trousers", "trousers", "shorts", "skirt")),
        skirt=float(rng.uniform(0.16, 0.34)),
        shoes=_cloth(rng, _SHOES, warmth=(0.0, 0.9)),
        hat=_cloth(rng, _HATS, warmth=(0.1, 0.6)),
        bag_kind=pick(rng, ("none", "none", "backpack", "handbag")),
        bag=_cloth(rng, _BAGS, warmth=(-0.2, 0.1)),
        bag_hand=int(pick(rng, (-1, 1))),
        spot=(
            float(rng.uniform(-0.06, 0.06)),
            float(rng.uniform(0.22, 0.62)),
            float(rng.uniform(0.022, 0.05)),
            float(pick(rng, (-0.1, 1.25))),
        ),
    )


@cache
def person(pid: int) -> Person:
    """The person of a pid, the same on every machine."""
    return random_person(np.random.default_rng([VERSION, 0, pid]))
