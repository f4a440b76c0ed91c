"""Questions about clips: which way, what, when, in which order, how many. The words alone give nothing away."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tokensieve.embedded.clips import DOINGS, FRAMES, MOMENTS, WAYS, Clip, draw_clip, random_doing
from tokensieve.embedded.scene_texts import Question
from tokensieve.embedded.scenes import PAIRS, Pair, name_of

CLIP_QUESTION_KINDS = ("direction", "event", "when", "order", "count")
COUNTS = ("zero", "one", "two", "three", "four")
_MOMENTS = ("start", "end")
_ABSENT = {"start": "appear", "end": "vanish"}  # what those objects do that are not there at this moment


def ask_clip(seed: int, index: int, pairs: Sequence[Pair] = PAIRS) -> tuple[Clip, Question]:
    """A clip and a question about it. Kinds of questions take turns, and the answers of a kind are equally likely."""
    rng = np.random.default_rng([seed, index, 7])
    kind = CLIP_QUESTION_KINDS[index % len(CLIP_QUESTION_KINDS)]
    if kind == "count":
        moment, count = _MOMENTS[int(rng.integers(2))], int(rng.integers(1, 5))
        absent = _ABSENT[moment]
        there = [name for name in DOINGS if name != absent]
        missing = int(rng.integers(max(0, 2 - count), 5 - count))
        names = [there[int(rng.integers(3))] for _ in range(count)] + [absent] * missing
        clip = _clip_of(rng, names, pairs)
        return clip, _count(clip, moment)
    needed = {"direction": ["move"], "order": ["appear", "appear"]}.get(kind, [])
    if kind == "event":
        needed = [DOINGS[int(rng.integers(4))]]
    elif kind == "when":
        needed = [DOINGS[int(rng.integers(2))]]
    clip = _random_clip(rng, needed, pairs)
    return clip, _questions(rng, clip, kind)[0]


def ask_many_clip(
    seed: int, index: int, number: int, backwards: bool = False, pairs: Sequence[Pair] = PAIRS
) -> tuple[Clip, list[Question]]:
    """A clip and up to `number` questions of all kinds about it, for training. backwards: the same frames the other way."""
    needed = ("appear", "appear") if index % 2 else ()  # else few clips could be asked for the order
    clip = _random_clip(np.random.default_rng([seed, index, 8]), needed, pairs, fewest=3)
    clip = clip.backwards() if backwards else clip
    rng = np.random.default_rng([seed, index, 9, backwards])
    by_kind = [_questions(rng, clip, kind) for kind in CLIP_QUESTION_KINDS]
    questions = [questions[turn] for turn in range(max(map(len, by_kind))) for questions in by_kind if turn < len(questions)]
    return clip, questions[:number]


def _random_clip(rng: np.random.Generator, needed: Sequence[str], pairs: Sequence[Pair], fewest: int = 2) -> Clip:
    """At most four objects. The first do what is needed, the others anything."""
    count = int(rng.integers(fewest, 5))
    return _clip_of(rng, [*needed, *(DOINGS[int(rng.integers(4))] for _ in range(count - len(needed)))], pairs)


def _clip_of(rng: np.random.Generator, names: Sequence[str], pairs: Sequence[Pair]) -> Clip:
    """A clip whose objects do this; no two appear in the same frame."""
    while True:
        doings = [random_doing(rng, name) for name in names]
        appearing = [doing.at for doing in doings if doing.name == "appear"]
        if len(set(appearing)) == len(appearing):
            return draw_clip(rng, doings, pairs)


def _count(clip: Clip, moment: str) -> Question:
    there = len(clip.present(FRAMES - 1 if moment == "end" else 0))
    return Question("count", f"how many objects are there at the {moment}?", COUNTS[there], COUNTS)


def _questions(rng: np.random.Generator, clip: Clip, kind: str) -> list[Question]:
    """All questions of a kind about a clip. The objects that a clip was made for come first."""
    made = []
    if kind == "count":
        return [_count(clip, moment) for moment in _MOMENTS]
    if kind == "order":
        appearing = [actor for actor in clip.actors if actor.doing.name == "appear"]
        for one, other in itertools.pairwise(appearing):
            first = min(one, other, key=lambda actor: actor.doing.at)
            one, other = (one, other) if rng.random() < 0.5 else (other, one)
            text = f"which appears first, the {name_of(one.pair)} or the {name_of(other.pair)}?"
            made.append(Question(kind, text, first.thing.shape, (one.thing.shape, other.thing.shape)))
        return made
    for actor in clip.actors:
        name, doing = name_of(actor.pair), actor.doing
        if kind == "event":
            made.append(Question(kind, f"what does the {name} do?", doing.name, DOINGS))
        elif kind == "direction" and doing.name == "move":
            made.append(Question(kind, f"which way does the {name} move?", doing.way, tuple(WAYS)))
        elif kind == "when" and doing.moment:
            made.append(Question(kind, f"when does the {name} {doing.name}?", doing.moment, tuple(MOMENTS)))
    return made
