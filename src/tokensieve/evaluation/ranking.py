"""`tokensieve eval --images PHOTOS --classnames A B`: the nearest classes of each image under each plan, without a data set."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve import provenance
from tokensieve.data.images import BrokenImage, open_photo
from tokensieve.data.own.classes import DEFAULT_TEMPLATES, name_classes
from tokensieve.data.own.files import list_files
from tokensieve.data.registry import CLASSIFY
from tokensieve.data.source import Broken
from tokensieve.device import find_device
from tokensieve.errors import UserError, short
from tokensieve.evaluation import results
from tokensieve.evaluation.arguments import (
    check_weights,
    has_plan_flags,
    requested_plans,
    warn_missing_switches,
    warn_unused_task_flags,
)
from tokensieve.evaluation.flags import AUTO, BENCHMARK_MODEL, DEFAULT_MODEL_TYPE, eval_flags
from tokensieve.evaluation.jobs import template_fields
from tokensieve.evaluation.notices import WarnOnce
from tokensieve.evaluation.passes import check_broken_share
from tokensieve.evaluation.plan_check import check_plans
from tokensieve.evaluation.planned_model import PlannedModel
from tokensieve.files import check_writable, is_stream, json_bytes, write_bytes
from tokensieve.models import loading
from tokensieve.models.loading.registry import MODEL_TYPES, type_of_name
from tokensieve.plan import Plan
from tokensieve.tasks.base import check_finite
from tokensieve.tasks.zeroshot_classification.classifier import zero_shot_classifier

PLANS = ("none", "anchor:50%")
TOP = 5  # classes that are told
USAGE = "for example tokensieve eval --images photos/*.jpg --classnames cat dog"


def is_requested(args: argparse.Namespace) -> bool:
    """Whether images are named, and no data set that they would belong to."""
    is_ranking = args.task in (AUTO, CLASSIFY)
    return bool(args.images) and not args.dataset and is_ranking and args.questions is None


# what eval takes and this has no use for
UNUSED = ("split", "language", "dataset_root", "num_workers", "dump_classnames", "dump_templates", "wds_cache_dir")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the ranking of every image under every plan; what --output stores of it, with the file if there is one."""
    classes = _classes(args)
    for flag in ("save_predictions", "skip_existing", "skip_load", "custom_classname_file", "custom_template_file"):
        if getattr(args, flag):
            raise UserError(f"--{flag} does not go with --images and --classnames; --output FILE stores the rankings.")
    if args.token_fusion != "cls":
        raise UserError(f"--token_fusion {args.token_fusion} needs a --dataset; leave it out.")
    plans = [Plan.parse(text) for text in dict.fromkeys(requested_plans(args) if has_plan_flags(args) else PLANS)]
    check_weights(args, plans)
    model, pretrained = _model(args)
    check_plans(model, args.model_type, plans, args.strict)
    files = list_files(args.images)[: args.limit]
    if not files:
        raise UserError(f"--images {short(' '.join(args.images), 200)}: there is no image in it; {USAGE}.")
    output = _output(args, model, pretrained)
    _warn_of_flags(args)
    device = find_device(args.device)
    loaded = loading.load(model, pretrained, model_type=args.model_type, cache_dir=args.model_cache_dir, device=device)
    for note in loaded.notes:
        print(f"tokensieve: {note}", file=sys.stderr)
    precision = partial(torch.autocast, device.type, enabled=device.type == "cuda" if args.amp is None else args.amp)
    planned = [PlannedModel(loaded.model, plan, args.seed, precision, weights=args.weights) for plan in plans]
    for one in planned:
        if one.is_unsupported and args.strict:
            raise UserError(f"{one.plan} cannot be applied to {model}: {one.reason}")
    classifier = zero_shot_classifier(loaded.model, loaded.tokenizer, classes, DEFAULT_TEMPLATES, device, precision)
    scale = getattr(loaded.model, "logit_scale", None)
    temperature = 100.0 if scale is None else float(scale.detach().exp())
    rankings: list[dict[str, Any]] = []
    unreadable: dict[str, str] = {}
    for numbers, names, images in _batches(files, loaded.transform, args.batch_size, unreadable):
        batch = images.to(device)
        found: list[dict[str, Any]] = [{"image": name, "plans": {}} for name in names]
        for one in planned:
            with torch.inference_mode(), precision():
                features = F.normalize(check_finite(one(batch, samples=numbers)).float(), dim=-1)
                shares = (temperature * features @ classifier.float()).softmax(dim=-1).cpu()  # (B, C)
            for entry, row in zip(found, shares, strict=True):
                entry["plans"][str(one.plan)] = _ranking(row, classes)
        rankings += found
        if not args.quiet:
            _print(found)
    broken = [Broken(name, reason) for name, reason in unreadable.items()]
    check_broken_share(broken, len(rankings), len(files), args.max_broken, "--images")
    notes = {str(one.plan): _about(one) for one in planned}
    for plan, about in notes.items():
        for note in about["notes"]:
            print(f"tokensieve: {plan}: {note}", file=sys.stderr)
    if not args.quiet:
        lost = f", {len(unreadable)} cannot be read" if unreadable else ""
        print(f"{len(rankings)} images{lost}; {model} ({pretrained or 'random weights'}), {device}")
    about_run = {"versions": provenance.versions(), "seed": args.seed, "device": str(device), "weights": loaded.fingerprint}
    told = {"model": model, "pretrained": pretrained, "classnames": classes, "templates": list(DEFAULT_TEMPLATES)}
    document = {**told, "plans": notes, "images": rankings, "unreadable": unreadable, "run": about_run}
    if output is None:
        return document
    content = json_bytes(document)
    if is_stream(output):
        write_bytes(output, content)
        return document
    written = results.create_new(output, provenance.digest([told, list(notes), about_run, list(map(str, files))]), content)
    if not args.quiet:
        print(f"rankings: {written}")
    return {"file": str(written), **document}


def _warn_of_flags(args: argparse.Namespace) -> None:
    """Name the flags that are given and have no effect."""
    warn = WarnOnce()
    warn_missing_switches(args, warn)
    warn_unused_task_flags(args, {CLASSIFY}, warn)
    for flag in (flag for flags in eval_flags().values() for flag in flags if flag.name in UNUSED):
        if getattr(args, flag.dest) != flag.default:
            warn(f"--{flag.name} has no effect without --dataset")


def _classes(args: argparse.Namespace) -> list[str]:
    if len(args.classnames) < 2:
        given = "one class name" if args.classnames else "no class names"
        raise UserError(
            f"--images with {given}: give --classnames with two or more, {USAGE}. Without classes, --dataset images:FOLDER "
            "compares the features of plans with those of the full model."
        )
    return name_classes(args.classnames, args.classnames, "--classnames")[0]


def _model(args: argparse.Namespace) -> tuple[str, str]:
    """The only model and its weights."""
    for name in args.model or [None]:
        kind = MODEL_TYPES.get_or_fail(type_of_name(name, args.model_type))
        if kind.is_model_name:
            raise UserError(
                f"--images with --classnames compares images with class names, and models of the type {kind.name} do not do "
                "that: give --dataset, or another model."
            )
    is_unnamed = not (args.model or args.pretrained_model) and args.model_type == DEFAULT_MODEL_TYPE
    names = [BENCHMARK_MODEL] if is_unnamed else args.model
    pairs = loading.model_pairs(names, args.pretrained, args.pretrained_model, args.model_type)
    if len(pairs) > 1:
        raise UserError(f"--images without --dataset takes one model, and there are {len(pairs)}.")
    loading.check_model(*pairs[0], args.model_type)
    return pairs[0]


def _output(args: argparse.Namespace, model: str, pretrained: str) -> Path | None:
    if args.output is None and args.run_folder is None:
        return None
    template = args.output or str(Path(args.run_folder) / results.RANKINGS)
    fields = template_fields(model, pretrained, "images", args.language[0], "ranking")
    path = results.result_path(template, plan="all", several_plans=False, **fields)
    check_writable(path)
    return path


def _batches(
    files: Sequence[Path], transform: Any, size: int, unreadable: dict[str, str]
) -> Iterator[tuple[Tensor, list[str], Tensor]]:
    """Numbers (B,), names and images (B,3,h,w) of the readable files; the others go into `unreadable`."""
    for start in range(0, len(files), size):
        numbers, names, images = [], [], []
        for number, file in enumerate(files[start : start + size], start):
            try:
                images.append(transform(open_photo(file)))
            except BrokenImage as error:
                unreadable[str(file)] = str(error)
                continue
            numbers.append(number)
            names.append(str(file))
        if images:
            yield torch.tensor(numbers), names, torch.stack(images)


def _ranking(shares: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The classes with the largest shares (C,), in order."""
    best = shares.topk(min(TOP, len(classes)))
    return [
        {"class": classes[index], "probability": value}
        for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def _about(one: PlannedModel) -> dict[str, Any]:
    """What a plan did."""
    ledger = one.handle.ledger if one.handle else []
    notes = [f"not applied, the full features are used: {one.reason}"] if one.is_unsupported else one.notes
    tokens = {"tokens_in": ledger[0].tokens_in, "tokens_out": ledger[-1].tokens_out} if ledger else {}
    return {"applied": one.handle is not None, **tokens, "notes": notes}


def _print(found: Sequence[dict[str, Any]]) -> None:
    for entry in found:
        print(short(entry["image"], 200))
        width = max(map(len, entry["plans"]))
        for plan, ranking in entry["plans"].items():
            shares = "   ".join(f"{short(item['class'])} {item['probability']:.1%}" for item in ranking)
            print(f"  {plan:<{width}}  {shares}")
