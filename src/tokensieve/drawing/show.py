"""`tokensieve show`: pictures of what plans keep of images, as PNG files; of a VLM also its answers to a question.

Objects of re-identification have a module of their own, show_reid.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tokensieve import files
from tokensieve.cutting.handle import apply
from tokensieve.data.vqa import load as load_questions
from tokensieve.data.vqa_items import VqaItem
from tokensieve.device import find_device
from tokensieve.drawing import band as drawing_band
from tokensieve.drawing.band import Band
from tokensieve.drawing.geometry import find_frame
from tokensieve.drawing.sheet import Picture, draw
from tokensieve.embedded.datasets import EmbeddedScenes
from tokensieve.errors import PlanWarning, UserError, nearest
from tokensieve.evaluation.arguments import DEFAULT_PLAN
from tokensieve.models import features, loading
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.models.loading.loaded import Loaded
from tokensieve.models.registry import open_tower
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan
from tokensieve.reid.layouts import NAMES

EMBEDDED = "embedded:"
DEFAULT_OUTPUT = "tokensieve-show.png"


def run(args: argparse.Namespace) -> list[Path]:
    """Draw all images under all plans into one picture, or with {image} in --output into one for each; the files."""
    from tokensieve.reid import show

    if show.is_reid(args):
        return show.run(args)
    plans = [Plan.parse(text) for text in (args.plan or DEFAULT_PLAN, *args.compare)]
    answers = args.model_type == "vlm" or args.model == load_vlm.EMBEDDED or args.question is not None
    model_type = "vlm" if answers else args.model_type
    if answers:
        asked = [read_question(text, number, args.question) for number, text in enumerate(args.images)]
        originals = [(name, item.image, number) for name, item, number in asked]
    else:
        originals = [read(text, number) for number, text in enumerate(args.images)]
    places = sheets(args.output or DEFAULT_OUTPUT, [name for name, _, _ in originals], str(plans[0]))
    named, weighted = ([name] if name is not None else None for name in (args.model, args.pretrained))
    model, pretrained = loading.model_pairs(named, weighted, None, model_type)[0]
    loaded = loading.load(model, pretrained, model_type=model_type, device=find_device(args.device))
    if isinstance(loaded, load_vlm.LoadedVlm):
        bands = make_answered_bands(loaded, plans, asked, seed=args.seed, weights=args.weights)
    else:
        bands = make_bands(loaded, plans, originals, seed=args.seed, weights=args.weights)
    return write({path: draw([band for number in numbers for band in bands[number]]) for path, numbers in places.items()})


def write(drawn: Mapping[Path, Picture]) -> list[Path]:
    """Writes pictures, each whole or not at all; another one that is there is moved aside."""
    for path, sheet in drawn.items():
        files.replace_file(path, sheet.png())
        print(path)
    return list(drawn)


def read(text: str, number: int) -> tuple[str, Image.Image, int]:
    """(name, image, number within the run) of an argument: a file, or embedded:N, which has the number it has in `eval`."""
    if not text.startswith(EMBEDDED):
        name, colon, _ = text.partition(":")
        if colon and not Path(text).exists() and (near := nearest(name, ("embedded", *NAMES))):
            raise UserError(f"{text}: there is no such file and no such data. Did you mean {near}:N?")
        return Path(text).name, drawing_band.as_image(text), number
    scenes = EmbeddedScenes("test")
    index = text.removeprefix(EMBEDDED)
    if not (index.isascii() and index.isdigit() and int(index) < len(scenes)):
        raise UserError(f"{text}: there are the scenes {EMBEDDED}0 to {EMBEDDED}{len(scenes) - 1}")
    return text, scenes[int(index)][0], int(index)


def read_question(text: str, number: int, question: str | None) -> tuple[str, VqaItem, int]:
    """(name, question with its image, number within the run) of an argument: a file, or embedded:N with its own question."""
    if not text.startswith(EMBEDDED):
        if question is None:
            raise UserError(
                f"{text}: a vision-language model is shown an image to be asked about it; give --question 'what is ...?'"
            )
        return Path(text).name, VqaItem(drawing_band.as_image(text), question, [], text), number
    data = load_questions("embedded-questions", split="test")
    index = text.removeprefix(EMBEDDED)
    if not (index.isascii() and index.isdigit() and int(index) < len(data)):
        raise UserError(f"{text}: there are the questions {EMBEDDED}0 to {EMBEDDED}{len(data) - 1}")
    item = data[int(index)]
    return text, item if question is None else replace(item, question=question, answers=[]), int(index)


def sheets(template: str, names: Sequence[str], plan: str) -> dict[Path, list[int]]:
    """Which images, by their number, are drawn in which file; all of them can be written."""
    sheets: dict[Path, list[int]] = {}
    for number, name in enumerate(names):
        stem = Path(name).stem.replace(":", "-")
        path = Path(files.format_template(template, "--output", image=stem, plan=files.slug(plan)))
        if path.suffix.lower() != ".png":
            raise UserError(f"--output {template}: pictures are PNG files, so the name has to end in .png")
        sheets.setdefault(path, []).append(number)
    if "{image" in template and len(sheets) < len(names):
        twice = next(path for path, numbers in sheets.items() if len(numbers) > 1)
        raise UserError(f"--output {template!r} names {twice} for several images: leave {{image}} out or rename one of them")
    for path in sheets:
        files.check_writable(path)
    return sheets


def make_bands(
    loaded: Loaded,
    plans: Sequence[Plan],
    originals: Sequence[tuple[str, Image.Image, int]],
    *,
    seed: int = 0,
    weights: Weights = None,
) -> list[list[Band]]:
    """For every image a band for every plan."""
    model: Any = loaded.model
    device = next(model.parameters()).device
    grid = open_tower(model).grid
    frames = [find_frame(loaded.transform, image.size) for _, image, _ in originals]
    batch = torch.stack([loaded.transform(image) for _, image, _ in originals]).to(device)
    made: list[list[Band]] = [[] for _ in originals]
    for plan in plans:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanWarning)  # its notes are in the picture
            handle = apply(model, plan, seed=seed, weights=weights if plan.is_trained else None)
        with torch.no_grad(), handle, handle.call(samples=torch.tensor([number for _, _, number in originals])):
            features.encode_image(model, batch)
        for place, ((name, image, _), frame) in enumerate(zip(originals, frames, strict=True)):
            made[place].append(drawing_band.make_band(handle, image, place, frame=frame, grid=grid, name=name))
    return made


def make_answered_bands(
    loaded: load_vlm.LoadedVlm,
    plans: Sequence[Plan],
    asked: Sequence[tuple[str, VqaItem, int]],
    *,
    seed: int = 0,
    weights: Weights = None,
) -> list[list[Band]]:
    """For every image a band for every plan, with the question, the full model's answer and the plan's."""
    from tokensieve.device import to_device
    from tokensieve.tasks.vqa.answering import answer, ask

    model: Any = loaded.model
    grid = open_tower(model).grid
    inputs = to_device(ask(loaded.processor, [item for _, item, _ in asked]), model.device)
    full = answer(model, loaded.processor, inputs)
    heads = []
    for (name, item, _), said in zip(asked, full, strict=True):
        told = f", expected: {item.answer!r}" if item.answers else ""
        heads.append(f"{name}: {item.question} Full model: {said!r}{told}")
    made: list[list[Band]] = [[] for _ in asked]
    for plan in plans:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanWarning)  # its notes are in the picture
            handle = apply(model, plan, seed=seed, weights=weights if plan.is_trained else None)
        with handle, handle.call(samples=torch.tensor([number for _, _, number in asked])):
            answers = answer(model, loaded.processor, inputs)
        for place, (_, item, _) in enumerate(asked):
            frame = find_frame(loaded.transform, item.image.size)
            band = drawing_band.make_band(handle, item.image, place, frame=frame, grid=grid, name=heads[place])
            made[place].append(replace(band, notes=[f"answer: {answers[place]!r}", *band.notes]))
    return made
