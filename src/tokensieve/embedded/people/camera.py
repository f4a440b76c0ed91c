"""A shot: a person before a background, as one camera sees them in its light."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tokensieve.embedded.people.attributes import VERSION, VIEWS, Point, person, pick, random_person
from tokensieve.embedded.people.backgrounds import any_colour, car_park, hall, park, street, stuff, texture
from tokensieve.embedded.people.body import Body, Pose
from tokensieve.embedded.people.canvas import ACROSS, DOWN, HEAT, HEIGHT, LIGHT, MASK, NEAR, WIDTH, Canvas


@dataclass(frozen=True)
class Camera:
    """What a camera does to all it sees."""

    background: Callable[[np.random.Generator, Canvas], None]
    cast: tuple[float, float, float]  # gain of red, green, blue
    contrast: float
    blur: float  # share of a pixel's light that goes to each neighbour
    size: Point  # height of an average person, from and to, in pixels
    lean: float
    near_gain: float
    heat_gain: float
    shift: tuple[tuple[int, int], tuple[int, int]]  # of near infrared and thermal against RGB (down, across), at most 1 pixel


CAMERA: tuple[Camera, ...] = (
    Camera(street, (1.06, 1.0, 0.92), 1.05, 0.06, (96, 110), 0.03, 1.0, 1.0, ((0, 0), (0, 0))),
    Camera(park, (0.92, 1.02, 1.0), 0.85, 0.16, (88, 102), -0.05, 0.85, 0.9, ((0, 1), (0, 0))),
    Camera(car_park, (0.88, 0.96, 1.14), 1.15, 0.1, (92, 108), 0.06, 1.1, 1.1, ((0, 0), (1, 0))),
    Camera(hall, (1.14, 1.0, 0.8), 0.95, 0.2, (100, 114), -0.02, 0.95, 0.85, ((0, 0), (0, -1))),
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
        view=pick(rng, VIEWS),
        phase=float(rng.uniform(0, 2 * math.pi)),
        size=float(rng.uniform(*camera.size)),
        centre=WIDTH / 2 + float(np.clip(rng.normal(0, 4), -8, 8)),
        feet=float(rng.uniform(115, 126)),
        lean=camera.lean + float(rng.normal(0, 0.02)),
    )


_MOST_HIDDEN = 0.25  # share of the person that others may hide


def _hide(rng: np.random.Generator, canvas: Canvas, camera: Camera, pose: Pose) -> None:
    """A pole, a box or a passer-by before the person, taken back where it would hide more than a quarter."""
    before = canvas.pixels.copy()
    kind = pick(rng, ("pole", "box", "passer-by"))
    side = pick(rng, (-1, 1))
    if kind == "pole":
        x, wide = pose.centre + rng.uniform(-16, 16), rng.uniform(2, 3.2)
        fill = stuff(rng, (0.4, 0.4, 0.42), 0.12, (0.1, 0.8), (0.1, 0.6))
        canvas.capsule((x, -6), (x + rng.uniform(-3, 3), HEIGHT + 6), wide, wide, fill)
    elif kind == "box":
        x, top = pose.centre + side * rng.uniform(4, 18), rng.uniform(88, 104)
        fill = stuff(rng, any_colour(rng), 0.06, (0.1, 0.9), (0.1, 0.7))
        canvas.box(x - 16, top, x + 16, HEIGHT + 4, fill, grow=1)
    else:
        other = Pose(
            pick(rng, VIEWS), rng.uniform(0, 6), rng.uniform(*camera.size), pose.centre + side * rng.uniform(23, 32), 130, 0
        )
        Body(canvas, random_person(rng), other, 0.0).draw()
    if canvas.pixels[MASK].sum() < (1 - _MOST_HIDDEN) * before[MASK].sum():
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
    return np.exp(-((ACROSS - x) ** 2 + (DOWN - y) ** 2 * 0.4) / (2 * 42.0**2))


def draw(pid: int, camera: int, shot: int) -> Drawing:
    """One shot of a person by a camera (from 0), in all three modalities."""
    eye = CAMERA[camera]
    rng = np.random.default_rng([VERSION, 1, pid, camera, shot])
    light, pose = _light(rng), _pose(rng, eye)

    canvas = Canvas()
    eye.background(rng, canvas)
    if rng.random() < 0.25:  # somebody behind
        other = Pose(pick(rng, VIEWS), rng.uniform(0, 6), rng.uniform(70, 100), rng.uniform(0, WIDTH), rng.uniform(100, 118), 0)
        Body(canvas, random_person(rng), other, 0.0).draw()
    pixels = canvas.pixels
    grain = texture(rng, 1) * 0.05 + texture(rng, 0) * 0.05
    pixels[:4] *= 1 + grain
    pixels[HEAT] += texture(rng, 0) * 0.04
    shadow = np.array([0.12, 0.12, 0.12, 0.1], dtype=np.float32)
    canvas.ellipse((pose.centre, pose.feet - 1), (18, 3), shadow, LIGHT, soft=4.0)

    Body(canvas, person(pid), pose, 1.0).draw()
    whole = canvas.pixels[MASK].copy()
    if rng.random() < 0.35:
        _hide(rng, canvas, eye, pose)
    visible = canvas.pixels[MASK].copy()

    pixels = canvas.pixels[:5]
    pixels[:4] *= 1 + texture(rng, 0) * 0.05 + (ACROSS / WIDTH - 0.5) * float(rng.normal(0, 0.25))  # light from one side
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

    near = (pixels[NEAR] - 0.5) * eye.near_gain * rng.uniform(0.8, 1.1) + 0.48 + rng.normal(0, 0.04)
    if light.near == "flash":
        veil = 0.82 + 0.16 * _glare(rng)
        near = near * (1 - veil) + veil
    near = near + noise[NEAR] * 0.025

    heat = _blurred(pixels[HEAT], 0.25)
    if light.heat == "hot day":  # everything is as warm as a body
        heat = 0.62 + (heat - 0.5) * rng.uniform(0.06, 0.12) + _blurred(texture(rng, 1), 0.2) * 0.03
    heat = (heat - 0.5) * eye.heat_gain * rng.uniform(0.8, 1.1) + 0.48 + rng.normal(0, 0.04) + noise[HEAT] * 0.015

    near_shift, heat_shift = eye.shift
    images = {
        "RGB": np.ascontiguousarray(_bytes(colour).transpose(1, 2, 0)),
        "NI": np.ascontiguousarray(_shifted(_bytes(near), *near_shift)),
        "TI": np.ascontiguousarray(_shifted(_bytes(heat), *heat_shift)),
    }
    return Drawing(images, light, visible, whole)
