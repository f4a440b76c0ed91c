"""`tokensieve show` for re-identification: what plans keep of objects, or with --gallery whom they find."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from tokensieve.cutting.handle import Handle, apply
from tokensieve.data.images import BrokenImage, decode
from tokensieve.device import find_device
from tokensieve.drawing import show
from tokensieve.errors import PlanWarning, UserError
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan
from tokensieve.reid import drawing, loading, ranking
from tokensieve.reid.data import ReidData
from tokensieve.reid.data import load as load_data
from tokensieve.reid.drawing import GalleryHit, ObjectPicture, Strip
from tokensieve.reid.layouts import LAYOUTS, MODALITIES, NAMES
from tokensieve.reid.model import ReidModel, check_cameras
from tokensieve.reid.scan import Shot, eight_bits
from tokensieve.reid.task import parse_modalities

T = TypeVar("T")
DEFAULT_TYPE = "open_clip"  # what --model_type is when it is not given
BATCH = 64  # objects of a gallery that are encoded together
MOST = 50  # objects of a gallery that can be drawn side by side


@dataclass(frozen=True)
class ShowTarget:
    """An object to be shown: a query of a data set, or files of its modalities."""

    name: str
    number: int  # within the run, by which random choices are made
    images: dict[str, Image.Image]
    queries: ReidData | None = None  # those of the data set, of which it is one

    @property
    def shot(self) -> Shot | None:
        return self.queries.shots[self.number] if self.queries else None

    @property
    def about(self) -> str:
        return ", ".join(_about(self.shot, self.queries.name)) if self.shot and self.queries else ""


def is_reid(args: argparse.Namespace) -> bool:
    """Whether the arguments are about re-identification."""
    asked = args.gallery or args.modalities is not None or args.model_type == "reid" or any(map(_is_object, args.images))
    return asked or (args.model is not None and (args.model == loading.EMBEDDED or loading.is_model(args.model)))


def run(args: argparse.Namespace) -> list[Path]:
    """Draw all objects under all plans (default: the one that the model was trained with); the files."""
    model_name = args.model or loading.EMBEDDED
    loading.check_model(model_name)
    if args.model_type not in ("reid", DEFAULT_TYPE):
        raise UserError(f"--model_type {args.model_type} does not go with a re-identification model; leave it out")
    if args.gallery and args.ranks > MOST:
        raise UserError(f"--ranks {args.ranks}: {MOST} fit into a picture at most")
    for flag in ("question", "pretrained"):
        if getattr(args, flag) is not None:
            raise UserError(f"--{flag} does not go with a re-identification model")
    given = None if args.plan is None else Plan.parse(args.plan)
    compared = [Plan.parse(text) for text in args.compare]
    loaded = loading.load(model_name, find_device(args.device))
    model: Any = loaded.model
    plans = [Plan.parse(model.plan) if given is None else given, *compared]
    shown = parse_modalities([args.modalities], model.modalities)[0] if args.modalities is not None else model.modalities
    targets = read(args.images, args.dataset_root, shown)
    for data in {id(target.queries): target.queries for target in targets if target.queries}.values():
        cameras = [shot.camera for shot in data.shots]
        check_cameras(min(cameras), max(cameras), model.settings)
    if args.gallery:
        for target in targets:
            if target.queries is None:
                raise UserError(f"{target.name}: --gallery ranks the gallery of a data set; give one of its queries, {USAGE}")
    sheets = show.sheets(args.output or show.DEFAULT_OUTPUT, [target.name for target in targets], str(plans[0]))
    if args.gallery:
        options = {"ranks": args.ranks, "seed": args.seed, "weights": args.weights}
        strips = make_strips(loaded, plans, targets, args.dataset_root, **options)
        drawn = {path: drawing.draw_gallery(_of(strips, numbers)) for path, numbers in sheets.items()}
    else:
        seen = make_seen(loaded, plans, targets, seed=args.seed, weights=args.weights)
        drawn = {path: drawing.draw(_of(seen, numbers)) for path, numbers in sheets.items()}
    return show.write(drawn)


def _of(made: Sequence[list[T]], numbers: Sequence[int]) -> list[T]:
    return [one for number in numbers for one in made[number]]


# --------------------------------------------------------------------------------------------------------------- what is shown

USAGE = "for example embedded-reid:12, or RGBNT201:12 with --dataset_root"


def _is_object(text: str) -> bool:
    return text.partition(":")[0] in NAMES or _modality(text) is not None


def _modality(text: str) -> str | None:
    """RGB of RGB=photo.jpg; None where a file is named without its modality."""
    name, equals, _ = text.partition("=")
    return name.upper() if equals and name.upper() in MODALITIES else None


def read(texts: Sequence[str], root: str, modalities: Sequence[str]) -> list[ShowTarget]:
    """The objects that arguments name: DATASET:N, a query of a data set, or MODALITY=FILE, whose second RGB begins another.

    Queries are numbered whatever modalities are shown, so one may lack a modality: a UserError if it is asked for.
    """
    queries = cache(lambda name: _told_of(load_data(name, root, "query", modalities=modalities, whole=False)))
    targets: list[ShowTarget] = []
    files: list[dict[str, str]] = []
    for text in texts:
        if (modality := _modality(text)) is not None:
            if modality not in modalities:
                raise UserError(
                    f"{text}: of the model's modalities {', '.join(modalities)} are shown, and this is none of them"
                )
            if not files or modality in files[-1]:
                files.append({})
            files[-1][modality] = text.partition("=")[2]
            continue
        name, colon, index = text.partition(":")
        if not colon or Path(text).exists() or name == "embedded":
            raise UserError(
                f"{text}: a re-identification model is shown objects: a query of a data set, {USAGE}, "
                "or files by their modality, RGB=a.jpg NI=b.jpg TI=c.jpg"
            )
        found = queries(name)
        if not (index.isascii() and index.isdigit() and int(index) < len(found)):
            raise UserError(f"{text}: there are the queries {name}:0 to {name}:{len(found) - 1}")
        try:
            targets.append(ShowTarget(text, int(index), found.read(int(index)), found))
        except BrokenImage as error:
            raise UserError(f"{text}: cannot read {error}") from error
    for number, named in enumerate(files):
        ordered = {modality: _opened(named[modality]) for modality in modalities if modality in named}
        targets.append(ShowTarget(Path(next(iter(named.values()))).stem, number, ordered))
    return targets


def _opened(file: str) -> Image.Image:
    """A file as those of data sets are read: 16 bits and floats by the image's own range."""
    try:
        return decode(file, eight_bits)
    except BrokenImage as error:
        raise UserError(f"cannot read {file}: {error}") from error


def _told_of(data: ReidData) -> ReidData:
    """The same, once its notes are told."""
    for note in data.notes:
        print(f"tokensieve: {note}", file=sys.stderr)
    return data


def _about(shot: Shot, data: str) -> list[str]:
    """Identity, scene and camera, as files of this data set are named."""
    scene = [] if shot.scene is None else [f"scene {shot.scene}"]
    return [f"id {shot.pid}", *scene, f"camera {shot.camera + LAYOUTS[data].first_camera}"]


# ---------------------------------------------------------------------------------------------------------- what is made of it


def _handle(model: ReidModel, plan: Plan, seed: int, weights: Weights) -> Handle:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # its notes are in the picture
        handle = apply(model, plan, seed=seed, weights=weights if plan.is_trained else None)
    handle.remove()
    return handle


def _inputs(loaded: loading.LoadedReid, objects: Sequence[dict[str, Image.Image]], cameras: Sequence[int]) -> dict[str, Tensor]:
    """A batch: of every modality all objects, and their cameras where those are known."""
    model: Any = loaded.model
    device = next(model.parameters()).device
    transform: Any = loaded.transform
    made = [transform(images) for images in objects]
    batch = {modality: torch.stack([one[modality] for one in made]).to(device) for modality in objects[0]}
    return batch | ({"cameras": torch.tensor(cameras, device=device)} if cameras else {})


def make_seen(
    loaded: loading.LoadedReid, plans: Sequence[Plan], targets: Sequence[ShowTarget], *, seed: int = 0, weights: Weights = None
) -> list[list[ObjectPicture]]:
    """For every object what every plan does to it."""
    model: Any = loaded.model
    handles = [_handle(model, plan, seed, weights) for plan in plans]
    made: list[list[ObjectPicture]] = []
    for target in targets:
        made.append([])
        inputs = _inputs(loaded, [target.images], [target.shot.camera] if target.shot else [])
        for handle in handles:
            with torch.inference_mode(), handle, handle.call(samples=torch.tensor([target.number])):
                model.encode(inputs)
            made[-1].append(
                drawing.see(
                    handle,
                    target.images,
                    size=model.settings.image_size,
                    grid=model.grid,
                    name=target.name,
                    about=target.about,
                )
            )
    return made


def make_strips(
    loaded: loading.LoadedReid,
    plans: Sequence[Plan],
    targets: Sequence[ShowTarget],
    root: str,
    *,
    ranks: int = 10,
    seed: int = 0,
    weights: Weights = None,
) -> list[list[Strip]]:
    """For every query whom it finds in the gallery of its data set under every plan."""
    handles = [_handle(loaded.model, plan, seed, weights) for plan in plans]
    galleries: dict[str, tuple[ReidData, list[int], list[Tensor]]] = {}
    strips: list[list[Strip]] = []
    for target in targets:
        strips.append([])
        queries, shot = target.queries, target.shot
        assert queries is not None and shot is not None
        if queries.name not in galleries:
            gallery = load_data(queries.name, root, "gallery", modalities=queries.modalities)
            for note in (note for note in gallery.notes if note not in queries.notes):
                print(f"tokensieve: {note}", file=sys.stderr)
            galleries[queries.name] = (
                gallery,
                *encode(loaded, handles, gallery, range(len(gallery)), f"gallery of {queries.name}"),
            )
        gallery, there, features = galleries[queries.name]
        _, asked = encode(loaded, handles, queries, [target.number])
        for handle, far, near in zip(handles, features, asked, strict=True):
            found = ranking.order(
                near[0],
                far,
                query_id=shot.pid,
                gallery_ids=[gallery.shots[index].pid for index in there],
                query_group=queries.groups[target.number],
                gallery_groups=[gallery.groups[index] for index in there],
            )
            nearest = [
                GalleryHit(gallery.read(there[place]), _about(gallery.shots[there[place]], gallery.name), distance, right)
                for place, right, distance in zip(*(column[:ranks].tolist() for column in found), strict=True)
            ]
            told = [*result_lines(found, len(there), gallery.rule), *handle.notes]
            strips[-1].append(Strip(str(handle.plan), told, target.name, target.images, _about(shot, queries.name), nearest))
    return strips


def encode(
    loaded: loading.LoadedReid,
    handles: Sequence[Handle],
    shots: ReidData,
    indices: Sequence[int],
    title: str | None = None,
) -> tuple[list[int], list[Tensor]]:
    """Which of these shots can be read, and for each plan their features (G, F); progress under the title."""
    model: Any = loaded.model
    there: list[int] = []
    made: list[list[Tensor]] = [[] for _ in handles]
    with tqdm(total=len(indices), desc=title, unit="img", disable=title is None) as progress, torch.inference_mode():
        for start in range(0, len(indices), BATCH):
            part, objects = indices[start : start + BATCH], []
            read = []
            for index in part:
                try:
                    objects.append(shots.read(index))
                    read.append(index)
                except BrokenImage as error:
                    print(f"tokensieve: left out of the gallery: {error}", file=sys.stderr)
            if objects:
                inputs = _inputs(loaded, objects, [shots.shots[index].camera for index in read])
                for handle, features in zip(handles, made, strict=True):
                    with handle, handle.call(samples=torch.tensor(read)):
                        features.append(model.encode(inputs).float().cpu())
            there += read
            progress.update(len(part))
    if not there:
        raise UserError(f"{shots.name} ({shots.split}): not one of its images can be read")
    return there, [torch.cat(features) for features in made]


def result_lines(found: ranking.Order, gallery: int, rule: str) -> list[str]:
    """How well a query was answered, in words."""
    places = torch.nonzero(found.right).flatten() + 1
    excluded = gallery - len(found.indices)
    left = f"{len(found.indices):,} of the gallery are ranked, {excluded} of the same identity and {rule} are left out"
    if not len(places):
        return [left, "none of them is right"]
    precision = float((torch.arange(1, len(places) + 1) / places).double().mean())
    return [left, f"average precision {precision:.3f}; {len(places)} are right, the first at place {int(places[0])}"]
