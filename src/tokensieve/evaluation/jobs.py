"""TODO docstring."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tokensieve.data import registry as data_registry
from tokensieve.errors import UserError
from tokensieve.evaluation import results
from tokensieve.evaluation.arguments import LINEAR_PROBE
from tokensieve.models import loading
from tokensieve.plan import Plan


@dataclass(frozen=True)
class Job:
    """One pass over one data set: a model, its weights, a language, and the result file of every plan."""

    model: str
    pretrained: str
    dataset: str
    language: str
    task: str
    plans: tuple[Plan, ...]
    files: dict[str, Path]  # by the plan's text
    splits: dict[str, Any]  # train_split, val_split and val_proportion of this data set


def list_jobs(args: argparse.Namespace, plans_of: Callable[[str, str], Sequence[Plan]], template: str) -> list[Job]:
    """All combinations, with every name checked and every result file different. plans_of: those of a model."""
    models = loading.model_pairs(args.model, args.pretrained, args.pretrained_model, args.model_type)
    for model, pretrained in models:
        loading.check_model(model, pretrained, args.model_type)
    datasets = data_registry.dataset_names(args.dataset)
    tasks = {name: data_registry.task_of(name) if args.task == "auto" else args.task for name in datasets}
    for name, task in tasks.items():
        if args.skip_load and task != LINEAR_PROBE:
            raise UserError(f"--skip_load works with --task {LINEAR_PROBE} only, not with {task} ({name}).")
    splits = _splits(args, datasets)
    jobs: list[Job] = []
    owner: dict[Path, str] = {}
    for (model, pretrained), dataset, language in dict.fromkeys(product(models, datasets, args.language)):
        names = template_fields(model, pretrained, dataset, language, f"{tasks[dataset]}{'_blind' * args.blind}")
        plans, files = tuple(plans_of(model, pretrained)), {}
        trained = [str(plan) for plan in plans if plan.is_trained]
        if args.skip_load and trained:
            raise UserError(f"--skip_load: {trained[0]} has trained weights, which belong to a model; leave --skip_load out.")
        for plan in map(str, plans):
            path = results.result_path(template, plan=plan, several_plans=len(plans) > 1, **names)
            this = f"{model},{pretrained} on {dataset} ({language}, {plan})"
            if path in owner:
                raise UserError(f"--output {template!r} names {path} both for {owner[path]} and for {this}.")
            owner[path], files[plan] = this, path
        jobs.append(Job(model, pretrained, dataset, language, tasks[dataset], plans, files, splits[dataset]))
    return jobs


def _splits(args: argparse.Namespace, datasets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """train_split, val_split and val_proportion of every data set: one for each, or one for all."""
    made: dict[str, dict[str, Any]] = {name: {} for name in datasets}
    for flag in ("train_split", "val_split", "val_proportion"):
        given = getattr(args, flag)
        if given is not None and len(given) not in (1, len(datasets)):
            raise UserError(f"--{flag} has {len(given)} values for {len(datasets)} data sets: give one, or one for each.")
        for number, name in enumerate(datasets):
            made[name][flag] = None if given is None else given[number if len(given) > 1 else 0]
    return made


def template_fields(model: str, pretrained: str, dataset: str, language: str, task: str) -> dict[str, str]:
    """What the placeholders of a file name stand for: clip_benchmark's, without separators of folders."""
    is_file = os.path.isfile(pretrained)
    return {
        "model": model.replace("/", "_"),
        "pretrained": os.path.basename(pretrained) if is_file else pretrained.replace("/", "_"),
        "pretrained_full_path": pretrained.replace("/", "_"),
        "task": task,
        "dataset": Path(dataset).stem if dataset.startswith("jsonl:") else dataset.removeprefix("wds/").replace("/", "_"),
        "language": language,
    }
