"""Short clips drawn by code: objects move, appear, vanish or stay while the camera stands still. All from (seed, index).

A clip is eight scenes of one place. Every object does one thing. Light flickers a little and the pixel noise is new in every
frame, so that no two frames are equal, as in a video from a camera.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tokensieve.embedded.scenes import FULL, PAIRS, SIZE, Pair, Scene, Thing, dress, random_thing

FRAMES = 8
DOINGS = ("appear", "vanish", "move", "stay")
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # steps in x and y
MOMENTS = {"early": (1, 2), "middle": (3, 4, 5), "late": (6, 7)}  # the frames at which something appears or is gone
_SMALLEST, _LARGEST = 26.0, 34.0  # diameters of objects, in pixels
_SHORTEST, _LONGEST = 45.0, 70.0  # how far an object moves in a clip, in pixels


@dataclass(frozen=True)
class Doing:
    """What an object does in a clip. at: the frame in which it is there for the first time (appear) or gone (vanish)."""

    name: str
    at: int = 0
    way: str = ""  # of a move

    @property
    def moment(self) -> str:
        return next((name for name, frames in MOMENTS.items() if self.at in frames), "")

    def shown(self, frame: int) -> bool:
        """Whether the object is there in this frame."""
        return {"appear": frame >= self.at, "vanish": frame < self.at}.get(self.name, True)

    def backwards(self) -> Doing:
        """What the object does when the clip runs backwards."""
        if self.name in ("appear", "vanish"):
            return Doing("vanish" if self.name == "appear" else "appear", at=FRAMES - self.at)
        if self.name == "move":
            x, y = WAYS[self.way]
            return Doing("move", way=next(way for way, step in WAYS.items() if step == (-x, -y)))
        return self


@dataclass(frozen=True)
class Actor:
    """An object of a clip: what it does, and its places (x, y) in all frames."""

    thing: Thing
    doing: Doing
    path: tuple[tuple[float, float], ...]

    @property
    def pair(self) -> Pair:
        return self.thing.pair

    def at(self, frame: int) -> Thing:
        x, y = self.path[frame]
        return replace(self.thing, x=x, y=y)


@dataclass(frozen=True)
class Clip:
    """Actors before a still background. grain: the seed of every frame's pixel noise; flicker: its brightness."""

    actors: tuple[Actor, ...]
    still: Scene  # without objects
    grain: tuple[int, ...]
    flicker: tuple[float, ...]

    def present(self, frame: int) -> list[Actor]:
        """The actors that are there in this frame."""
        return [actor for actor in self.actors if actor.doing.shown(frame)]

    def scene(self, frame: int) -> Scene:
        light = replace(self.still.light, brightness=self.still.light.brightness * self.flicker[frame])
        things = tuple(actor.at(frame) for actor in self.present(frame))
        return replace(self.still, objects=things, light=light, grain_seed=self.grain[frame])

    def scenes(self) -> list[Scene]:
        return [self.scene(frame) for frame in range(FRAMES)]

    def backwards(self) -> Clip:
        """The same frames from the last to the first."""
        actors = tuple(Actor(actor.thing, actor.doing.backwards(), actor.path[::-1]) for actor in self.actors)
        return replace(self, actors=actors, grain=self.grain[::-1], flicker=self.flicker[::-1])


def random_doing(rng: np.random.Generator, name: str) -> Doing:
    """The moment's name is drawn before its frame, so that all three are equally likely."""
    if name in ("appear", "vanish"):
        frames = MOMENTS[tuple(MOMENTS)[int(rng.integers(3))]]
        return Doing(name, at=frames[int(rng.integers(len(frames)))])
    return Doing(name, way=tuple(WAYS)[int(rng.integers(4))]) if name == "move" else Doing(name)


def draw_clip(rng: np.random.Generator, doings: Sequence[Doing], pairs: Sequence[Pair] = PAIRS) -> Clip:
    """A clip with one actor for each doing, of different shapes and colours, that never touch each other."""
    chosen: list[Pair] = []
    while len(chosen) < len(doings):
        colour, shape = pairs[int(rng.integers(len(pairs)))]
        if all(colour != c and shape != s for c, s in chosen):
            chosen.append((colour, shape))
    actors: list[Actor] = []
    tries = 0
    while len(actors) < len(doings):
        doing, size = doings[len(actors)], rng.uniform(_SMALLEST, _LARGEST)
        path = _path(rng, doing, size)
        if all(_apart(path, size, other) for other in actors):
            thing = random_thing(rng, chosen[len(actors)], *path[0], size)
            actors.append(Actor(thing, doing, path))
        tries += 1
        if tries % 50 == 0:  # no room is left: begin again
            actors.clear()
    still = dress(rng, (), FULL)
    grain = tuple(int(seed) for seed in rng.integers(2**32, size=FRAMES))
    return Clip(tuple(actors), still, grain, tuple(float(f) for f in rng.uniform(0.97, 1.03, FRAMES)))


def _path(rng: np.random.Generator, doing: Doing, size: float) -> tuple[tuple[float, float], ...]:
    """Where an object of this size is in every frame: it moves evenly along a straight line, or not at all."""
    low, high = size / 2, SIZE - size / 2
    x, y = rng.uniform(low, high, 2)
    if doing.name != "move":
        return ((x, y),) * FRAMES
    along, drift = rng.uniform(_SHORTEST, min(_LONGEST, high - low)), rng.uniform(-8, 8)
    dx, dy = WAYS[doing.way]
    end = np.array([x + along * dx + drift * abs(dy), y + along * dy + drift * abs(dx)])
    start = np.array([x, y])
    shift = np.clip(np.minimum(start, end), low, None) - np.minimum(start, end)  # back inside, at the low sides
    shift -= np.clip(np.maximum(start, end) + shift - high, 0, None)  # and at the high ones
    steps = np.linspace(start + shift, end + shift, FRAMES)  # (frames, 2)
    return tuple((float(a), float(b)) for a, b in steps)


def _apart(path: Sequence[tuple[float, float]], size: float, other: Actor) -> bool:
    """Whether an object on this path never touches the other, also in frames where one of them is not there."""
    reach = (size + other.thing.size) / 2
    return all(math.hypot(x - a, y - b) > reach for (x, y), (a, b) in zip(path, other.path, strict=True))
