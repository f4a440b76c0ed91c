"""Embedded clips: what is asked about them is true of what they show, and the words alone tell nothing."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from tokensieve.embedded import scenes
from tokensieve.embedded.clip_texts import CLIP_QUESTION_KINDS, COUNTS, ask_clip, ask_many_clip
from tokensieve.embedded.clips import FRAMES, MOMENTS, Clip
from tokensieve.embedded.datasets import EmbeddedClips


def places(clip: Clip, name: str) -> list[tuple[float, float] | None]:
    """Where the object of that name is in every frame, from the scenes that are drawn; None: it is not there."""
    found = [[thing for thing in scene.objects if scenes.name_of(thing.pair) == name] for scene in clip.scenes()]
    assert all(len(things) <= 1 for things in found)
    return [(things[0].x, things[0].y) if things else None for things in found]


def seen_doing(clip: Clip, name: str) -> tuple[str, int]:
    """What an object does, by its places alone, and in which frame."""
    at = places(clip, name)
    if at[0] is None:
        return "appear", next(frame for frame, place in enumerate(at) if place is not None)
    if at[-1] is None:
        return "vanish", next(frame for frame, place in enumerate(at) if place is None)
    return ("stay", 0) if at[0] == at[-1] else ("move", 0)


def right_answer(clip: Clip, text: str) -> str:
    """The answer to a question, from the places of the objects in the frames."""
    words = text.rstrip("?").split()
    if text.startswith("how many"):
        frame = 0 if words[-1] == "start" else FRAMES - 1
        return COUNTS[len(clip.scene(frame).objects)]
    if text.startswith("which appears first"):
        one, other = (" ".join(words[i : i + 2]) for i in (4, 8)) if len(words) == 10 else ("", "")
        first = min((one.rstrip(","), other), key=lambda name: seen_doing(clip, name)[1])
        return first.split()[1]
    name = " ".join(words[3:5])
    if text.startswith("which way"):
        name = " ".join(words[4:6])
        (x, y), *_, (u, v) = places(clip, name)
        return ("right" if u > x else "left") if abs(u - x) > abs(v - y) else ("down" if v > y else "up")
    doing, frame = seen_doing(clip, name)
    if text.startswith("what does"):
        return doing
    assert text.startswith("when does") and words[-1] == doing
    return next(moment for moment, frames in MOMENTS.items() if frame in frames)


@pytest.mark.parametrize("kind", CLIP_QUESTION_KINDS)
def test_answers_are_true_of_what_is_drawn(kind):
    start = CLIP_QUESTION_KINDS.index(kind)
    for index in range(start, start + 200, 5):
        clip, question = ask_clip(11, index)
        assert question.kind == kind and question.answer in question.answers
        assert right_answer(clip, question.text) == question.answer


def test_training_asks_the_same_questions_forwards_and_backwards():
    for index in range(30):
        clip, questions = ask_many_clip(12, index, 50)
        turned, others = ask_many_clip(12, index, 50, backwards=True)
        assert {question.kind for question in (*questions, *others)} >= {"event", "count"}
        for shown, asked in ((clip, questions), (turned, others)):
            assert all(right_answer(shown, question.text) == question.answer for question in asked)
        for frame in range(FRAMES):
            assert np.array_equal(scenes.render(clip.scene(frame)), scenes.render(turned.scene(FRAMES - 1 - frame)))
        assert len(ask_many_clip(12, index, 3)[1]) == 3


def test_objects_stay_inside_and_never_touch():
    for index in range(60):
        clip, _ = ask_clip(13, index)
        for frame in range(FRAMES):
            things = clip.scene(frame).objects
            for i, thing in enumerate(things):
                r = thing.size / 2 - 1e-6
                assert r <= thing.x <= scenes.SIZE - r and r <= thing.y <= scenes.SIZE - r
                assert all(math.hypot(thing.x - o.x, thing.y - o.y) > (thing.size + o.size) / 2 for o in things[:i])


def test_frames_differ_by_noise_where_nothing_happens():
    clip, _ = ask_clip(14, 0)
    bare = Clip((), clip.still, clip.grain, clip.flicker)
    first, second = (scenes.render(bare.scene(frame)).astype(float) for frame in (0, 1))
    assert 0 < np.abs(first - second).mean() < 2 * clip.still.noise + 0.06 * 255
    assert scenes.render(bare.scene(1)).tobytes() == scenes.render(bare.scene(1)).tobytes()


def test_a_clip_is_made_from_its_seed_and_its_number():
    one, other = EmbeddedClips("val"), EmbeddedClips("test")
    assert one.ask(3) == EmbeddedClips("val").ask(3)
    assert one.ask(3) != other.ask(3) and one.ask(3) != one.ask(8)
    frames, question = one[3]
    assert len(frames) == FRAMES and question == one.ask(3)[1]
    assert np.array_equal(np.asarray(frames[2]), scenes.render(one.ask(3)[0].scene(2)))
    held_out = {pair for index in range(200) for pair in (actor.pair for actor in one.ask(index)[0].actors)}
    assert held_out <= set(scenes.SEEN)
    with pytest.raises(IndexError):
        one[len(one)]


@pytest.mark.parametrize("kind", CLIP_QUESTION_KINDS)
def test_no_answer_is_common(kind):
    """Of 300 questions of a kind, the commonest answer to any text of a question is near what chance gives."""
    start = CLIP_QUESTION_KINDS.index(kind)
    asked = [ask_clip(15, index)[1] for index in range(start, start + 1500, 5)]
    if kind == "order":
        share = np.mean([question.answer == question.answers[0] for question in asked])
        assert abs(share - 0.5) < 0.1
        return
    answers = Counter(question.answer for question in asked)
    wanted = len(asked) / (4 if kind == "count" else len(asked[0].answers))
    assert max(answers.values()) < 1.4 * wanted and min(answers.values()) > 0.6 * wanted
