"""Scenes: the same (seed, index) gives the same picture, and what is said about a scene is true."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tokensieve.embedded import scenes
from tokensieve.embedded.scene_texts import (
    DIFFERENCES,
    QUESTION_KINDS,
    Question,
    ask,
    ask_many,
    caption,
    captions,
    relation,
    twins,
)


def test_every_pair_of_shape_and_colour_is_a_class_and_twelve_are_held_out():
    assert len(scenes.PAIRS) == len(set(scenes.PAIRS)) == 80
    assert len(scenes.HELD_OUT) == 12 and set(scenes.HELD_OUT) < set(scenes.PAIRS)
    assert not set(scenes.SEEN) & set(scenes.HELD_OUT)
    held_shapes, held_colours = Counter(s for _, s in scenes.HELD_OUT), Counter(c for c, _ in scenes.HELD_OUT)
    assert max(held_shapes.values()) <= 2 and max(held_colours.values()) <= 2
    assert {s for _, s in scenes.SEEN} == set(scenes.SHAPES) and {c for c, _ in scenes.SEEN} == set(scenes.COLOURS)


@pytest.mark.parametrize("make", [lambda i: scenes.single(7, i, scenes.PAIRS[i]), lambda i: scenes.several(7, i)])
def test_pictures_depend_on_seed_and_index_alone(make):
    first, again, other = scenes.render(make(3)), scenes.render(make(3)), scenes.render(make(4))
    assert first.shape == (112, 112, 3) and first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_different_seeds_give_different_scenes():
    assert scenes.single(1, 0, scenes.PAIRS[0]) != scenes.single(2, 0, scenes.PAIRS[0])


@pytest.mark.parametrize("shape", scenes.SHAPES)
def test_a_shape_is_drawn_in_its_colour_and_turns_with_its_angle(shape):
    thing = scenes.Thing(shape, "red", (200.0, 0.0, 0.0), 56, 56, 60, 0.0, "plain", 0.0)
    flat, turned = np.zeros((3, 112, 112), np.float32), np.zeros((3, 112, 112), np.float32)
    scenes._draw(flat, thing)
    scenes._draw(turned, scenes.Thing(shape, "red", (200.0, 0.0, 0.0), 56, 56, 60, np.pi / 2, "plain", 0.0))
    assert flat[0].max() == 200 and flat[1:].max() == 0
    area = (flat[0] > 100).sum() / (np.pi * 30**2)
    assert 0.2 < area < 0.95  # a good part of its circle, never all of it
    assert np.abs(np.rot90(flat[0], -1) - turned[0]).mean() < 3  # but for the edge, a quarter turn is a quarter turn
    outside = np.hypot(*np.mgrid[-55.5:56.5, -55.5:56.5]) > 32
    assert flat[0][outside].max() == 0


def test_shapes_are_told_apart_by_their_outline():
    masks = []
    for shape in scenes.SHAPES:
        canvas = np.zeros((3, 112, 112), np.float32)
        scenes._draw(canvas, scenes.Thing(shape, "red", (1.0, 1.0, 1.0), 56, 56, 60, 0.0, "plain", 0.0))
        masks.append(canvas[0] > 0.5)
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert (a & b).sum() / (a | b).sum() < 0.9


def test_the_labelled_object_is_whole_and_the_largest_and_lies_anywhere():
    places = []
    for i in range(400):
        scene = scenes.single(5, i, scenes.PAIRS[i % 80])
        (thing,) = scene.objects
        assert thing.pair == scenes.PAIRS[i % 80]
        assert thing.size / 2 <= min(thing.x, thing.y) and max(thing.x, thing.y) <= 112 - thing.size / 2
        assert all(other.size * 2 < thing.size for other in (*scene.behind, *scene.before))
        places.append((thing.x, thing.y))
    spread = np.array(places)
    assert np.abs(spread.mean(0) - 56).max() < 6
    assert spread.min() < 25 and spread.max() > 87


def test_several_objects_do_not_overlap_and_share_neither_shape_nor_colour():
    counts = Counter()
    for i in range(200):
        things = scenes.several(5, i, scenes.SEEN).objects
        counts[len(things)] += 1
        assert len({t.shape for t in things}) == len({t.colour for t in things}) == len(things)
        assert {t.pair for t in things} <= set(scenes.SEEN)
        for n, a in enumerate(things):
            assert all(np.hypot(a.x - b.x, a.y - b.y) > (a.size + b.size) / 2 for b in things[:n])
    assert set(counts) == {2, 3, 4} and min(counts.values()) > 40


def test_captions_are_true():
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    for i in range(100):
        scene = scenes.several(9, i)
        first, *others = scene.objects
        told = caption(scene)
        assert told.startswith(f"a {first.colour} {first.shape} ")
        for other in others:
            word = relation(first, other)
            assert f"{word} a {other.colour} {other.shape}" in told
            assert relation(other, first) == opposite[word]
            axis = (first.x - other.x) if word in ("left of", "right of") else (first.y - other.y)
            assert (axis < 0) == (word in ("left of", "above"))


def test_there_is_a_caption_seen_from_every_object_and_the_others_come_from_left_to_right():
    for i in range(50):
        scene = scenes.several(9, i)
        told = captions(scene)
        things = sorted(scene.objects, key=lambda thing: thing.x)
        assert [text.split()[1:3] for text in told] == [list(thing.pair) for thing in things]
        for thing, text in zip(things, told, strict=True):
            around = [other for other in things if other is not thing]
            assert [word for word in text.split() if word in scenes.SHAPES] == [thing.shape, *(o.shape for o in around)]
            assert all(f"{relation(thing, other)} a {scenes.name_of(other.pair)}" in text for other in around)


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_twins_differ_in_one_thing_and_each_caption_is_false_of_the_other(difference):
    for i in range(60):
        first, second = twins(3, i, difference)
        assert (first, second) == twins(3, i, difference)
        assert first.behind == second.behind and first.ground_seed == second.ground_seed
        told = [caption(first), caption(second)]
        assert told[0] != told[1] and first.objects[2:] == second.objects[2:]
        pairs, others = ({t.pair for t in scene.objects} for scene in (first, second))
        if difference == "place":
            assert pairs == others
            (a, b), (c, d) = first.objects[:2], second.objects[:2]
            assert (a.x, a.y, b.x, b.y) == (d.x, d.y, c.x, c.y)
            assert relation(a, b) != relation(c, d)
        else:
            assert len(others - pairs) == (2 if difference == "colour" else 1)
            assert {w for p in pairs for w in p} == {w for p in others for w in p} or difference == "object"
        for n, a in enumerate(second.objects):
            assert all(np.hypot(a.x - b.x, a.y - b.y) > (a.size + b.size) / 2 for b in second.objects[:n])


def test_an_unknown_difference_is_an_error():
    with pytest.raises(KeyError):
        twins(0, 0, "size")


def _true_answer(scene: scenes.Scene, question: Question) -> str:
    """Answer from the words of the question and the scene, on a way of its own."""
    words = question.text.rstrip("?").split()
    by_shape = {t.shape: t for t in scene.objects}
    by_colour = {t.colour: t for t in scene.objects}
    if question.kind == "colour":
        return by_shape[words[-1]].colour
    if question.kind == "shape":
        return by_colour[words[-2]].shape
    if question.kind == "count":
        return ["one", "two", "three", "four"][len(scene.objects) - 1]
    if question.kind == "presence":
        return "yes" if tuple(words[-2:]) in {t.pair for t in scene.objects} else "no"
    dx = by_shape[words[4]].x - by_shape[words[-1]].x
    dy = by_shape[words[4]].y - by_shape[words[-1]].y
    return max([(-dx, "left of"), (dx, "right of"), (-dy, "above"), (dy, "below")])[1]


def test_answers_are_true_and_no_answer_is_a_good_guess():
    answers: dict[str, Counter] = {kind: Counter() for kind in QUESTION_KINDS}
    allowed = {}
    for i in range(3000):
        scene, question = ask(11, i)
        assert question.answer == _true_answer(scene, question)
        assert question.answer in question.answers
        answers[question.kind][question.answer] += 1
        allowed[question.kind] = question.answers
    for kind, counts in answers.items():
        assert set(counts) == set(allowed[kind])
        assert max(counts.values()) / sum(counts.values()) < 1.25 / len(allowed[kind]) + 0.03


def test_asking_is_deterministic():
    assert ask(1, 4) == ask(1, 4)


def test_many_questions_about_a_scene_are_true_and_balanced():
    answers: dict[str, Counter] = {kind: Counter() for kind in QUESTION_KINDS}
    for i in range(1000):
        scene, questions = ask_many(11, i, 8, scenes.SEEN)
        assert scene == ask_many(11, i, 3, scenes.SEEN)[0] and 1 <= len(scene.objects) <= 4
        assert 3 <= len(questions) <= 8 and all(thing.pair in scenes.SEEN for thing in scene.objects)
        texts = [question.text for question in questions if question.kind != "presence"]
        assert len(texts) == len(set(texts))
        for question in questions:
            assert question.answer == _true_answer(scene, question)
            answers[question.kind][question.answer] += 1
    for kind, counts in answers.items():
        assert max(counts.values()) / sum(counts.values()) < 1.35 / len(counts) + 0.03, kind
    assert ask_many(11, 0, 0)[1] == []


def test_cells_tell_what_fills_each_square():
    """Counted another way: from the pixels that change when an object is painted in another colour."""
    for index in range(20):
        scene = replace(scenes.several(7, index), before=(), behind=(), noise=0.0)
        found = scenes.cells(scene, 8)
        assert found.shape == (14, 14)
        for place, thing in enumerate(scene.objects):
            other = replace(thing, rgb=tuple(255 - c for c in thing.rgb))
            changed = replace(scene, objects=tuple(other if t is thing else t for t in scene.objects))
            differs = (scenes.render(scene) != scenes.render(changed)).any(-1).reshape(14, 8, 14, 8).mean((1, 3))
            assert (differs[found == place] > 0.15).all() and (found[differs > 0.75] == place).all()
            assert (differs[found == scenes.GROUND] < 0.35).all() and (found == place).any()
