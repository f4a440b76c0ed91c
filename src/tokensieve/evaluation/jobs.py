"""The jobs of an evaluation: every model with every data set and language, and the result file of every plan."""

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
from tokensieve.evaluation.arguments import tasks_of
from tokensieve.files import is_stream
from tokensieve.models import loading
from tokensieve.plan import Plan
from tokensieve.tasks.registry import TASKS, all_tasks, task_flags


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
    values: dict[str, Any]  # of flags that take one value for each data set, such as train_split


def list_jobs(args: argparse.Namespace, plans_of: Callable[[str, str, str], Sequence[Plan]], template: str) -> list[Job]:
    """All combinations, with every name checked and every result file different.

    plans_of: the plans of a task, a model and its weights.
    """
    models = loading.model_pairs(args.model, args.pretrained, args.pretrained_model, args.model_type)
    for model, pretrained in models:
        loading.check_model(model, pretrained, args.model_type)
    tasks = tasks_of(args)
    for name, task in tasks.items():
        if args.skip_load and not TASKS[task].runs_without_model:
            able = " or ".join(spec.name for spec in all_tasks() if spec.runs_without_model)
            raise UserError(f"--skip_load works with --task {able} only, not with {task} ({name}).")
    values = _values_by_dataset(args, list(tasks))
    suffix = "".join(f"_{flag.name}" for flag, _ in task_flags().values() if flag.names_result and getattr(args, flag.dest))
    jobs: list[Job] = []
    owner: dict[Path, str] = {}
    for (model, pretrained), dataset, language in dict.fromkeys(product(models, tasks, args.language)):
        names = template_fields(model, pretrained, dataset, language, f"{tasks[dataset]}{suffix}")
        plans, files = tuple(plans_of(tasks[dataset], model, pretrained)), {}
        trained = [str(plan) for plan in plans if plan.is_trained]
        if args.skip_load and trained:
            raise UserError(f"--skip_load: {trained[0]} has trained weights, which belong to a model; leave --skip_load out.")
        for plan in map(str, plans):
            path = results.result_path(template, plan=plan, several_plans=len(plans) > 1, **names)
            this = f"{model},{pretrained} on {dataset} ({language}, {plan})"
            if args.save_predictions and is_stream(path):
                raise UserError(f"--save_predictions writes beside the result, and {path} is no file: give another --output.")
            if path in owner and not is_stream(path):
                raise UserError(f"--output {template!r} names {path} both for {owner[path]} and for {this}.")
            owner[path], files[plan] = this, path
        jobs.append(Job(model, pretrained, dataset, language, tasks[dataset], plans, files, values[dataset]))
    return jobs


def _values_by_dataset(args: argparse.Namespace, datasets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The values of each data set for flags that take one for each, or one for all."""
    made: dict[str, dict[str, Any]] = {name: {} for name in datasets}
    for flag in (flag for flag, _ in task_flags().values() if flag.per_dataset):
        values = getattr(args, flag.dest)
        if values is not None and len(values) not in (1, len(datasets)):
            raise UserError(f"--{flag.name} has {len(values)} values for {len(datasets)} data sets: give one, or one for each.")
        for number, name in enumerate(datasets):
            made[name][flag.dest] = None if values is None else values[number if len(values) > 1 else 0]
    return made


def template_fields(model: str, pretrained: str, dataset: str, language: str, task: str) -> dict[str, str]:
    """What the placeholders of a file name stand for: clip_benchmark's, without separators of folders."""
    is_file = os.path.isfile(pretrained)
    return {
        "model": model.replace("/", "_"),
        "pretrained": os.path.basename(pretrained) if is_file else pretrained.replace("/", "_"),
        "pretrained_full_path": pretrained.replace("/", "_"),
        "task": task,
        "dataset": data_registry.file_name(dataset),
        "language": language,
    }
