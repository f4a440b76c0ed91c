"""`tokensieve show` of questions about images: what plans keep, with the answers of a vision-language model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tokensieve.data.images import BrokenImage
from tokensieve.data.own.files import is_own_data, pick_numbers, split_number
from tokensieve.data.registry import find_dataset
from tokensieve.data.vqa import load as load_questions
from tokensieve.data.vqa_items import VqaData, VqaItem
from tokensieve.device import to_device
from tokensieve.drawing import show
from tokensieve.drawing.band import Band, as_image, make_band
from tokensieve.drawing.geometry import Frame, find_frame
from tokensieve.drawing.sheet import draw
from tokensieve.drawing.show_images import EMBEDDED, MOST, apply_quietly, expand, file_name, load_model, read_plans
from tokensieve.errors import UserError
from tokensieve.models.loading import vlm
from tokensieve.models.registry import open_vlm
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan
from tokensieve.tasks.vqa.answering import answer, ask

NamedQuestion = tuple[str, VqaItem, int]  # name, question with its image, and its number within the run


def accepts(args: argparse.Namespace) -> bool:
    is_vlm = args.model is not None and vlm.is_model_name(args.model)
    if args.model_type == "vlm" or is_vlm or args.question is not None:
        return True
    return any(_has_questions(split_number(text)[0]) for text in args.images if is_own_data(text))


def _has_questions(name: str) -> bool:
    spec = find_dataset(name)
    return spec is not None and spec.contents == "questions"


def run(args: argparse.Namespace) -> list[Path]:
    """Draw images under all plans, with the answers to questions about them; the files."""
    plans = read_plans(args)
    questions = read_all(args.images, args.question)
    sheets = show.sheets(args.output or show.DEFAULT_OUTPUT, [name for name, _, _ in questions], str(plans[0]))
    loaded = load_model(args, "vlm")
    assert isinstance(loaded, vlm.LoadedVlm)
    bands = make_bands(loaded, plans, questions, seed=args.seed, weights=args.weights)
    return show.write({path: draw([band for number in numbers for band in bands[number]]) for path, numbers in sheets.items()})


def read_all(texts: Sequence[str], question: str | None) -> list[NamedQuestion]:
    """The questions of all arguments; csv:FILE with questions stands for its rows."""
    made: list[NamedQuestion] = []
    for text in texts:
        name = split_number(text)[0]
        if is_own_data(text) and _has_questions(name):
            data = load_questions(name)
            _, numbers, remark = pick_numbers(text, len(data), MOST)
            if remark:
                print(f"tokensieve: {remark}", file=sys.stderr)
            made += [_asked(f"{name}:{number}", data, number, question) for number in numbers]
        else:
            made += [read(file, len(made), question) for file in expand([text])]
    return made


def _asked(name: str, data: VqaData, number: int, question: str | None) -> NamedQuestion:
    """A question of a data set, or another one about its image."""
    try:
        item = data[number]
    except BrokenImage as error:
        raise UserError(f"{name}: cannot read {error}") from error
    return name, item if question is None else replace(item, question=question, answers=[]), number


def read(text: str, number: int, question: str | None) -> NamedQuestion:
    """The question that an argument means: about a file, or embedded:N with its own question unless another is given."""
    if not text.startswith(EMBEDDED):
        if question is None:
            raise UserError(f"{text}: a vision-language model needs a question about the image; give --question 'what is ...?'")
        return file_name(text), VqaItem(as_image(text), question, [], text), number
    data = load_questions("embedded-questions", split="test")
    index = text.removeprefix(EMBEDDED)
    if not (index.isascii() and index.isdigit() and int(index) < len(data)):
        raise UserError(f"{text}: there are the questions {EMBEDDED}0 to {EMBEDDED}{len(data) - 1}")
    return _asked(text, data, int(index), question)


def make_bands(
    loaded: vlm.LoadedVlm,
    plans: Sequence[Plan],
    questions: Sequence[NamedQuestion],
    *,
    seed: int = 0,
    weights: Weights = None,
) -> list[list[Band]]:
    """For every image a band for every plan, with the question, the full model's answer and the plan's."""
    model: Any = loaded.model
    opened = open_vlm(model)
    tower = None if opened is None else opened.tower
    handles = []
    for plan in plans:
        with apply_quietly(model, plan, seed, weights) as handle:
            handles.append(handle)
    bands: list[list[Band]] = [[] for _ in questions]
    for row, (name, item, number) in enumerate(questions):  # one at a time: images may have different numbers of tokens
        inputs = to_device(ask(loaded.processor, [item]), model.device)
        full = answer(model, loaded.processor, inputs)[0]
        expected = f", expected: {item.answer!r}" if item.answers else ""
        heading = f"{name}: {item.question} Full model: {full!r}{expected}"
        whole = Frame(0, 0, *item.image.size)
        frame = whole if tower is None else find_frame(loaded.transform, item.image.size)
        for handle in handles:
            with handle, handle.call(samples=torch.tensor([number])):
                said = answer(model, loaded.processor, inputs)[0]
            band = make_band(handle, item.image, frame=frame, grid=None if tower is None else tower.grid, name=heading)
            bands[row].append(replace(band, notes=[f"answer: {said!r}", *band.notes]))
    return bands
