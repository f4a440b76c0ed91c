"""`tokensieve show` of images: files, or scenes of the embedded test set."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from tokensieve.cutting.handle import Handle, apply
from tokensieve.data.own.files import is_own_data, list_files, pick_numbers, split_number
from tokensieve.device import find_device
from tokensieve.drawing import show
from tokensieve.drawing.band import Band, as_image, make_band
from tokensieve.drawing.geometry import find_frame
from tokensieve.drawing.sheet import draw
from tokensieve.embedded.datasets import EmbeddedScenes
from tokensieve.errors import PlanWarning, UserError, nearest
from tokensieve.evaluation.arguments import DEFAULT_PLAN
from tokensieve.models import features, loading
from tokensieve.models.loading.loaded import Loaded
from tokensieve.models.registry import open_tower
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan

DATASETS = ("embedded",)
EMBEDDED = "embedded:"
MOST = 8  # images of a data set that are drawn

NamedImage = tuple[str, Image.Image, int]  # name, image, and its number within the run, which seeds random choices


def accepts(args: argparse.Namespace) -> bool:
    return True


def run(args: argparse.Namespace) -> list[Path]:
    """Draw images under all plans; the files."""
    plans = read_plans(args)
    images = [read(text, number) for number, text in enumerate(expand(args.images))]
    sheets = show.sheets(args.output or show.DEFAULT_OUTPUT, [name for name, _, _ in images], str(plans[0]))
    bands = make_bands(load_model(args, args.model_type), plans, images, seed=args.seed, weights=args.weights)
    return show.write({path: draw([band for number in numbers for band in bands[number]]) for path, numbers in sheets.items()})


def read_plans(args: argparse.Namespace) -> list[Plan]:
    return [Plan.parse(text) for text in (args.plan or DEFAULT_PLAN, *args.compare)]


def load_model(args: argparse.Namespace, model_type: str) -> Loaded:
    """The model that the flags name, or the embedded one of this type."""
    models, weights = ([name] if name is not None else None for name in (args.model, args.pretrained))
    model, pretrained = loading.model_pairs(models, weights, None, model_type)[0]
    return loading.load(model, pretrained, model_type=model_type, device=find_device(args.device))


def expand(texts: Sequence[str]) -> list[str]:
    """The arguments, with the files of own data (folder:DIR, images:DIR, csv:FILE, or one of them as NAME:N) in its place."""
    made: list[str] = []
    for text in texts:
        if not is_own_data(text):
            made.append(text)
            continue
        found = list_files([split_number(text)[0]])
        if not found:
            raise UserError(f"{text}: there is no image in it")
        _, numbers, remark = pick_numbers(text, len(found), MOST)
        made += [str(found[number]) for number in numbers]
        if remark:
            print(f"tokensieve: {remark}", file=sys.stderr)
    return made


def read(text: str, number: int) -> NamedImage:
    """The image that an argument names: a file, or embedded:N, which keeps the number that it has in `eval`."""
    if not text.startswith(EMBEDDED):
        name, colon, _ = text.partition(":")
        if colon and not Path(text).exists() and (near := nearest(name, show.dataset_names())):
            raise UserError(f"{text}: there is no such file and no such data. Did you mean {near}:N?")
        return file_name(text), as_image(text), number
    scenes = EmbeddedScenes("test")
    index = text.removeprefix(EMBEDDED)
    if not (index.isascii() and index.isdigit() and int(index) < len(scenes)):
        raise UserError(f"{text}: there are the scenes {EMBEDDED}0 to {EMBEDDED}{len(scenes) - 1}")
    return text, scenes[int(index)][0], int(index)


def file_name(text: str) -> str:
    """A file in titles: its name with its folder.

    >>> file_name("photos/cats/1.jpg"), file_name("1.jpg")
    ('cats/1.jpg', '1.jpg')
    """
    path = Path(text)
    return f"{path.parent.name}/{path.name}" if path.parent.name else path.name


def apply_quietly(model: nn.Module, plan: Plan, seed: int, weights: Weights) -> Handle:
    """The plan on the model. Its warnings are notes in the picture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        return apply(model, plan, seed=seed, weights=weights if plan.is_trained else None)


def make_bands(
    loaded: Loaded,
    plans: Sequence[Plan],
    images: Sequence[NamedImage],
    *,
    seed: int = 0,
    weights: Weights = None,
) -> list[list[Band]]:
    """For every image a band for every plan."""
    model: Any = loaded.model
    device = next(model.parameters()).device
    grid = open_tower(model).grid
    frames = [find_frame(loaded.transform, image.size) for _, image, _ in images]
    batch = torch.stack([loaded.transform(image) for _, image, _ in images]).to(device)
    bands: list[list[Band]] = [[] for _ in images]
    for plan in plans:
        handle = apply_quietly(model, plan, seed, weights)
        with torch.no_grad(), handle, handle.call(samples=torch.tensor([number for _, _, number in images])):
            features.encode_image(model, batch)
        for row, ((name, image, _), frame) in enumerate(zip(images, frames, strict=True)):
            bands[row].append(make_band(handle, image, row, frame=frame, grid=grid, name=name))
    return bands
