"""A person in a pose, painted part by part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tokensieve.embedded.people.attributes import Cloth, Person, Point
from tokensieve.embedded.people.canvas import AIR_HEAT, LIGHT, ONLY_HEAT, SKIN_HEAT, Canvas, Fill, channel_values, draw_pattern


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


class Body:
    """Paints a person in a pose. Body coordinates: u across, v from 0 (crown) to 1 (soles), shares of the body's height."""

    def __init__(self, canvas: Canvas, who: Person, pose: Pose, mask: float) -> None:
        self.canvas, self.who, self.pose, self.mask = canvas, who, pose, mask
        self.side = pose.view in ("left", "right")
        self.turn = -1.0 if pose.view in ("left", "back") else 1.0  # what is at the person's left changes sides
        self.size = pose.size * who.height

    def at(self, u: float, v: float) -> Point:
        u = u * self.turn
        return (
            self.pose.centre + self.size * _STRETCH * (u + self.pose.lean * (v - 0.5)),
            self.pose.feet + self.size * (v - 1),
        )

    def length(self, share: float) -> float:
        return share * self.size * (1 + _STRETCH) / 2

    def cloth(self, cloth: Cloth, shade: float = 1.0) -> np.ndarray | Fill:
        heat = AIR_HEAT + (SKIN_HEAT - AIR_HEAT) * cloth.warmth
        first = channel_values(cloth.colour * shade, cloth.near[0] * shade, heat, self.mask)
        if cloth.pattern == "plain" or (cloth.pattern == "logo" and self.pose.view == "back"):
            return first
        step = channel_values(cloth.second * shade, cloth.near[1] * shade, heat, self.mask) - first

        def fill(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            v = (y - self.pose.feet) / self.size + 1
            u = (x - self.pose.centre) / (self.size * _STRETCH) - self.pose.lean * (v - 0.5)
            return first[:, None, None] + step[:, None, None] * draw_pattern(cloth, u * self.turn, v)

        return fill

    def bare(self, shade: float = 1.0) -> np.ndarray:
        return channel_values(self.who.skin * shade, 0.72 * shade, SKIN_HEAT, self.mask)

    def limb(self, points: list[Point], radii: list[float], covered: float, cover: Cloth, shade: float) -> None:
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
        self, left: float, top: float, right: float, bottom: float, fill: np.ndarray | Fill, grow: float = 0.8
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
        fill: np.ndarray | Fill,
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
        self.canvas.ellipse(self.at(u * (0.6 if self.side else 1), v), (size, size), spot, ONLY_HEAT, soft=3.0)

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
        return channel_values(self.who.hair, 0.25 + 0.5 * float(self.who.hair.mean()), 0.62, self.mask)

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
                    self.canvas.ellipse(self.at(eye * radius, radius * 1.0), (0.9, 0.7), dark, LIGHT)
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
