"""`tokensieve show` for re-identification: what plans keep of objects, or with --gallery what a query finds in a gallery."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor

from tokensieve.cutting.handle import Handle
from tokensieve.data.images import BrokenImage, decode
from tokensieve.device import find_device
from tokensieve.drawing import show
from tokensieve.drawing.show_images import apply_quietly
from tokensieve.errors import UserError
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan
from tokensieve.reid import drawing, loading, ranking
from tokensieve.reid.data import ReidData
from tokensieve.reid.data import load as load_data
from tokensieve.reid.drawing import GalleryHit, ObjectPicture, Strip
from tokensieve.reid.layouts import MODALITIES, NAMES
from tokensieve.reid.model import ReidModel, check_cameras
from tokensieve.reid.own import holds_objects, is_own
from tokensieve.reid.scan import Shot, eight_bits
from tokensieve.reid.task import parse_modalities
from tokensieve.terminal import progress

T = TypeVar("T")
DEFAULT_TYPE = "open_clip"  # the default of --model_type
BATCH = 64  # objects of a gallery that are encoded together
MAX_RANKS = 50  # objects of a gallery that can be drawn side by side


@dataclass(frozen=True)
class ShowTarget:
    """An object to draw: a query of a data set, or files of its modalities."""

    name: str
    number: int  # within the run, which seeds random choices
    images: dict[str, Image.Image]
    queries: ReidData | None = None  # all queries of its data set

    @property
    def shot(self) -> Shot | None:
        return self.queries.shots[self.number] if self.queries else None

    @property
    def about(self) -> str:
        return ", ".join(_about(self.shot, self.queries)) if self.shot and self.queries else ""


def accepts(args: argparse.Namespace) -> bool:
    """Whether the arguments are about re-identification."""
    if args.gallery or args.modalities is not None or args.model_type == "reid" or any(map(_is_object, args.images)):
        return True
    return args.model is not None and (args.model == loading.EMBEDDED or loading.is_model(args.model))


def run(args: argparse.Namespace) -> list[Path]:
    """Draw all objects under all plans (default: the one that the model was trained with); the files."""
    model_name = args.model or loading.EMBEDDED
    loading.check_model(model_name)
    if args.model_type not in ("reid", DEFAULT_TYPE):
        raise UserError(f"--model_type {args.model_type} does not go with a re-identification model; leave it out")
    if args.gallery and args.ranks > MAX_RANKS:
        raise UserError(f"--ranks {args.ranks}: at most {MAX_RANKS} fit into a picture")
    for flag in ("question", "pretrained"):
        if getattr(args, flag) is not None:
            raise UserError(f"--{flag} does not go with a re-identification model")
    first = None if args.plan is None else Plan.parse(args.plan)
    others = [Plan.parse(text) for text in args.compare]
    loaded = loading.load(model_name, find_device(args.device))
    model: Any = loaded.model
    plans = [Plan.parse(model.plan) if first is None else first, *others]
    modalities = model.modalities
    if args.modalities is not None:
        modalities = parse_modalities([args.modalities], modalities)[0]
    targets = read(args.images, args.dataset_root, modalities)
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
        return show.write({path: drawing.draw_gallery(_select(strips, numbers)) for path, numbers in sheets.items()})
    objects = make_objects(loaded, plans, targets, seed=args.seed, weights=args.weights)
    return show.write({path: drawing.draw(_select(objects, numbers)) for path, numbers in sheets.items()})


def _select(by_target: Sequence[list[T]], numbers: Sequence[int]) -> list[T]:
    return [item for number in numbers for item in by_target[number]]


# --------------------------------------------------------------------------------------------------------------------- objects

USAGE = "for example embedded-reid:12, or RGBNT201:12 with --dataset_root"


def _is_object(text: str) -> bool:
    name = text.rpartition(":")[0]
    return name in NAMES or holds_objects(name) or holds_objects(text) or _modality(text) is not None


def _modality(text: str) -> str | None:
    """RGB of RGB=photo.jpg; None for other arguments."""
    name, equals, _ = text.partition("=")
    return name.upper() if equals and name.upper() in MODALITIES else None


def read(texts: Sequence[str], root: str, modalities: Sequence[str]) -> list[ShowTarget]:
    """The objects that arguments name: DATASET:N, a query of a data set, or MODALITY=FILE; a second RGB starts another object.

    Queries are numbered whatever modalities are drawn. One may lack a modality: a UserError if it is requested.
    """
    queries = cache(lambda name: _print_notes(load_data(name, root, "query", modalities=modalities, whole=False)))
    targets: list[ShowTarget] = []
    files: list[dict[str, str]] = []
    for text in texts:
        if (modality := _modality(text)) is not None:
            if modality not in modalities:
                raise UserError(f"{text}: the modalities that are drawn are {', '.join(modalities)}, and this is none of them")
            if not files or modality in files[-1]:
                files.append({})
            files[-1][modality] = text.partition("=")[2]
            continue
        name, colon, index = text.rpartition(":")
        if is_own(text) and not index.isdigit():
            name, index = text, ""
        if not colon or Path(text).exists() or name == "embedded":
            raise UserError(
                f"{text}: a re-identification model needs objects: a query of a data set, {USAGE}, "
                "or files by their modality, RGB=a.jpg NI=b.jpg TI=c.jpg"
            )
        data = queries(name)
        if not (index.isascii() and index.isdigit() and int(index) < len(data)):
            raise UserError(f"{text}: there are the queries {name}:0 to {name}:{len(data) - 1}")
        try:
            targets.append(ShowTarget(text, int(index), data.read(int(index)), data))
        except BrokenImage as error:
            raise UserError(f"{text}: cannot read {error}") from error
    for number, paths in enumerate(files):
        images = {modality: _read_image(paths[modality]) for modality in modalities if modality in paths}
        targets.append(ShowTarget(Path(next(iter(paths.values()))).stem, number, images))
    return targets


def _read_image(file: str) -> Image.Image:
    """A file, read like those of data sets: 16 bits and floats are scaled by the image's own range."""
    try:
        return decode(file, eight_bits)
    except BrokenImage as error:
        raise UserError(f"cannot read {file}: {error}") from error


def _print_notes(data: ReidData) -> ReidData:
    """Print the notes of a data set and return it."""
    for note in data.notes:
        print(f"tokensieve: {note}", file=sys.stderr)
    return data


def _about(shot: Shot, data: ReidData) -> list[str]:
    """Identity, scene and camera, numbered as in the files of this data set."""
    scene = [] if shot.scene is None else [f"scene {shot.scene}"]
    return [f"id {shot.pid}", *scene, f"camera {shot.camera + data.layout.first_camera}"]


# -------------------------------------------------------------------------------------------------------------------- pictures


def _make_handle(model: ReidModel, plan: Plan, seed: int, weights: Weights) -> Handle:
    """A handle that is not on the model yet: several are used in turn."""
    handle = apply_quietly(model, plan, seed, weights)
    handle.remove()
    return handle


def _inputs(loaded: loading.LoadedReid, objects: Sequence[dict[str, Image.Image]], cameras: Sequence[int]) -> dict[str, Tensor]:
    """A batch: the images of all objects by modality, and their cameras where they are known."""
    model: Any = loaded.model
    device = next(model.parameters()).device
    transform: Any = loaded.transform
    tensors = [transform(images) for images in objects]
    batch = {modality: torch.stack([one[modality] for one in tensors]).to(device) for modality in objects[0]}
    return batch | ({"cameras": torch.tensor(cameras, device=device)} if cameras else {})


def make_objects(
    loaded: loading.LoadedReid, plans: Sequence[Plan], targets: Sequence[ShowTarget], *, seed: int = 0, weights: Weights = None
) -> list[list[ObjectPicture]]:
    """For every target what every plan does to it."""
    model: Any = loaded.model
    handles = [_make_handle(model, plan, seed, weights) for plan in plans]
    pictures: list[list[ObjectPicture]] = []
    for target in targets:
        pictures.append([])
        inputs = _inputs(loaded, [target.images], [target.shot.camera] if target.shot else [])
        for handle in handles:
            with torch.inference_mode(), handle, handle.call(samples=torch.tensor([target.number])):
                model.encode(inputs)
            pictures[-1].append(
                drawing.picture_object(
                    handle,
                    target.images,
                    size=model.settings.image_size,
                    grid=model.grid,
                    name=target.name,
                    about=target.about,
                )
            )
    return pictures


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
    """For every query what it finds in the gallery of its data set under every plan."""
    handles = [_make_handle(loaded.model, plan, seed, weights) for plan in plans]
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
        gallery, indices, gallery_features = galleries[queries.name]
        _, query_features = encode(loaded, handles, queries, [target.number])
        for handle, of_gallery, of_query in zip(handles, gallery_features, query_features, strict=True):
            order = ranking.order(
                of_query[0],
                of_gallery,
                query_id=shot.pid,
                gallery_ids=[gallery.shots[index].pid for index in indices],
                query_group=queries.groups[target.number],
                gallery_groups=[gallery.groups[index] for index in indices],
            )
            hits = [
                GalleryHit(gallery.read(indices[row]), _about(gallery.shots[indices[row]], gallery), distance, is_match)
                for row, is_match, distance in zip(*(column[:ranks].tolist() for column in order), strict=True)
            ]
            notes = [*result_lines(order, len(indices), gallery.rule), *handle.notes]
            strips[-1].append(Strip(str(handle.plan), notes, target.name, target.images, _about(shot, queries), hits))
    return strips


def encode(
    loaded: loading.LoadedReid,
    handles: Sequence[Handle],
    shots: ReidData,
    indices: Sequence[int],
    title: str | None = None,
) -> tuple[list[int], list[Tensor]]:
    """The indices of the shots that can be read, and for each plan their features (G, F). title: of the progress bar."""
    model: Any = loaded.model
    readable: list[int] = []
    features: list[list[Tensor]] = [[] for _ in handles]
    with progress.bar(total=len(indices), desc=title, unit="img", quiet=title is None) as bar, torch.inference_mode():
        for start in range(0, len(indices), BATCH):
            batch, objects = indices[start : start + BATCH], []
            read = []
            for index in batch:
                try:
                    objects.append(shots.read(index))
                    read.append(index)
                except BrokenImage as error:
                    print(f"tokensieve: left out of the gallery: {error}", file=sys.stderr)
            if objects:
                inputs = _inputs(loaded, objects, [shots.shots[index].camera for index in read])
                for handle, batches in zip(handles, features, strict=True):
                    with handle, handle.call(samples=torch.tensor(read)):
                        batches.append(model.encode(inputs).float().cpu())
            readable += read
            bar.update(len(batch))
    if not readable:
        raise UserError(f"{shots.name} ({shots.split}): none of its images can be read")
    return readable, [torch.cat(batches) for batches in features]


def result_lines(order: ranking.Order, gallery: int, rule: str) -> list[str]:
    """The result of a query in words."""
    ranks = torch.nonzero(order.right).flatten() + 1
    excluded = gallery - len(order.indices)
    left = f"{len(order.indices):,} of the gallery are ranked, {excluded} of the same identity and {rule} are left out"
    if not len(ranks):
        return [left, "none of them is right"]
    precision = float((torch.arange(1, len(ranks) + 1) / ranks).double().mean())
    return [left, f"average precision {precision:.3f}; {len(ranks)} are right, the first at rank {int(ranks[0])}"]
