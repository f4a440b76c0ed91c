"""Captions of the embedded scenes, pairs of scenes that differ in one thing, and questions with answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tokensieve.embedded.scenes import COLOURS, PAIRS, SHAPES, SIZE, Pair, Scene, Thing, name_of, random_thing, several


def relation(a: Thing, b: Thing) -> str:
    """Where a lies relative to b, along the axis on which they are further apart."""
    dx, dy = a.x - b.x, a.y - b.y
    if abs(dx) >= abs(dy):
        return "left of" if dx < 0 else "right of"
    return "above" if dy < 0 else "below"


def caption(scene: Scene) -> str:
    """A true sentence that names every object: "a red circle left of a blue star and above a white ring"."""
    first, *others = scene.objects
    return _described_from(first, others)


def _described_from(first: Thing, others: Sequence[Thing]) -> str:
    relations = [f"{relation(first, other)} a {name_of(other.pair)}" for other in others]
    return f"a {name_of(first.pair)} {' and '.join(relations)}".strip()


def captions(scene: Scene) -> list[str]:
    """One true sentence for each object, from its position; objects and what lies around them come from left to right.

    So the picture shows all that a sentence holds, but for the object it begins with: there is one for each.
    """
    things = sorted(scene.objects, key=lambda thing: thing.x)
    return [_described_from(thing, [other for other in things if other is not thing]) for thing in things]


DIFFERENCES = ("colour", "place", "object")


def twins(seed: int, index: int, difference: str, pairs: Sequence[Pair] = PAIRS) -> tuple[Scene, Scene]:
    """Two scenes alike in all but one thing, so that each one's caption is false of the other.

    Two objects change their colours or their places, or one object becomes another of a new colour and shape.
    """
    for attempt in itertools.count():
        first = several(seed, index + attempt * 1_000_000_000, pairs)
        rng = np.random.default_rng([seed, index, attempt, 5])
        a, b, *others = first.objects
        if difference == "colour":
            a, b = replace(a, colour=b.colour, rgb=b.rgb), replace(b, colour=a.colour, rgb=a.rgb)
        elif difference == "place":  # with their sizes, so that nothing overlaps
            a, b = replace(a, x=b.x, y=b.y, size=b.size), replace(b, x=a.x, y=a.y, size=a.size)
        elif difference == "object":
            there = {word for thing in first.objects for word in thing.pair}
            new = [pair for pair in pairs if not there & set(pair)]
            b = random_thing(rng, new[int(rng.integers(len(new)))], b.x, b.y, b.size)
        else:
            raise KeyError(difference)
        if {a.pair, b.pair} <= set(pairs):
            return first, replace(first, objects=(a, b, *others))
    raise AssertionError


@dataclass(frozen=True)
class Question:
    """A question about a scene, its short answer, and all answers that this kind of question can have."""

    kind: str
    text: str
    answer: str
    answers: tuple[str, ...]


QUESTION_KINDS = ("colour", "shape", "count", "position", "presence")
NUMBERS = ("one", "two", "three", "four")
RELATIONS = ("left of", "right of", "above", "below")
PLACES = ("left", "right", "above", "below")


def ask(seed: int, index: int, pairs: Sequence[Pair] = PAIRS) -> tuple[Scene, Question]:
    """A scene and a question about it. Each kind's answers are equally likely, so the words alone give nothing away."""
    rng = np.random.default_rng([seed, index, 1])
    kind = QUESTION_KINDS[index % len(QUESTION_KINDS)]
    count = int(rng.integers(1, 5)) if kind == "count" else None
    scene = several(seed, index, pairs, count)
    return scene, _question(rng, scene, kind, rng.permutation(len(scene.objects)), pairs)


def ask_many(
    seed: int, index: int, number: int, pairs: Sequence[Pair] = PAIRS, kinds: Sequence[str] = QUESTION_KINDS
) -> tuple[Scene, list[Question]]:
    """A scene of 1 to 4 objects and up to `number` questions about it, the kinds in turn: for training, which may also ask
    for the "place" of one object. Only presence may come twice, so that yes and no stay equally likely."""
    rng = np.random.default_rng([seed, index, 6])
    scene = several(seed, index, pairs, int(rng.integers(1, 5)))
    things = len(scene.objects)
    kinds = [kind for kind in kinds if kind != "position" or things > 1]
    questions: dict[str | int, Question] = {}
    for turn in range(2 * number):  # a scene of one object has few questions
        kind = kinds[(index + turn) % len(kinds)]
        question = _question(rng, scene, kind, rng.permutation(things), pairs)
        if len(questions) < number:
            questions.setdefault(turn if kind == "presence" else question.text, question)
    return scene, list(questions.values())


def _question(rng: np.random.Generator, scene: Scene, kind: str, picked: np.ndarray, pairs: Sequence[Pair]) -> Question:
    """A question of a kind about the first of the picked objects (and the second, where the kind needs two)."""
    thing = scene.objects[picked[0]]
    if kind == "colour":
        return Question(kind, f"what colour is the {thing.shape}?", thing.colour, tuple(COLOURS))
    if kind == "shape":
        return Question(kind, f"what shape is the {thing.colour} object?", thing.shape, SHAPES)
    if kind == "count":
        return Question(kind, "how many objects are there?", NUMBERS[len(scene.objects) - 1], NUMBERS)
    if kind == "position":
        other = scene.objects[picked[1]]
        text = f"where is the {name_of(thing.pair)} seen from the {name_of(other.pair)}?"
        return Question(kind, text, relation(thing, other), RELATIONS)
    if kind == "place":
        middle = replace(thing, x=SIZE / 2, y=SIZE / 2)
        text = f"where is the {name_of(thing.pair)} in the picture?"
        return Question(kind, text, PLACES[RELATIONS.index(relation(thing, middle))], PLACES)
    pair = thing.pair
    present = {t.pair for t in scene.objects}
    answer = "yes" if rng.random() < 0.5 else "no"
    while answer == "no" and pair in present:
        pair = pairs[int(rng.integers(len(pairs)))]
    return Question(kind, f"is there a {name_of(pair)}?", answer, ("yes", "no"))
