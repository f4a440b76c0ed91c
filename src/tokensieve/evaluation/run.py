"""`tokensieve eval`: every model on every data set in every language, under all plans in one pass over the data.

Errors in the arguments (names, plans, files that cannot be written) are found before anything is loaded. Several processes
share the batches of every data set; process 0 sorts the records, computes the metrics and writes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tokensieve.data import registry as data_registry
from tokensieve.device import find_device
from tokensieve.distributed import Processes, join_processes
from tokensieve.errors import UserError
from tokensieve.evaluation import ranking, results
from tokensieve.evaluation.arguments import (
    DEFAULT_JOB,
    DEFAULT_JOB_LIMIT,
    check_weights,
    has_default_plans,
    has_plan_flags,
    requested_plans,
    resolve_task_and_model_type,
    tasks_of,
    warn_missing_switches,
    warn_unused_flags,
)
from tokensieve.evaluation.flags import AUTO, DEFAULT_MODEL_TYPE
from tokensieve.evaluation.jobs import list_jobs
from tokensieve.evaluation.notices import WarnOnce
from tokensieve.evaluation.plan_check import check_plans
from tokensieve.evaluation.run_folder import recorded
from tokensieve.evaluation.run_job import run_job
from tokensieve.files import check_writable, is_stream, read_json
from tokensieve.models import loading
from tokensieve.models.loading import open_clip as load_open_clip
from tokensieve.models.loading.loaded import Loaded
from tokensieve.plan import Plan
from tokensieve.registry import resolve
from tokensieve.tasks.registry import TASKS

DEFAULT_FOLDER = "results"


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all jobs that the arguments describe; what is stored in each result file (in process 0), with its name."""
    if args.run_folder is not None and args.output is not None:
        raise UserError("--run_folder and --output both say where results go; give one of them.")
    with (
        join_processes(args.distributed, args.timeout) as processes,
        recorded(args.run_folder if processes.is_main else None, args),
    ):
        if ranking.is_requested(args):
            return [processes.run_on_main(lambda: ranking.run(args))]
        return [{"file": str(path), **read_json(path)} for path in _run(args, processes) if not is_stream(path)]


def _run(args: argparse.Namespace, processes: Processes) -> list[Path]:
    warn = WarnOnce(silent=not processes.is_main)
    warn_missing_switches(args, warn)
    nothing_named = not any((args.dataset, args.model, args.pretrained, args.pretrained_model))
    is_default_run = (
        nothing_named
        and not has_plan_flags(args)
        and args.task == AUTO
        and args.model_type == DEFAULT_MODEL_TYPE
        and args.token_fusion == "cls"
    )
    plans = [Plan.parse(text) for text in (DEFAULT_JOB if is_default_run else requested_plans(args))]
    plans = list({str(plan): plan for plan in plans}.values())
    args = resolve_task_and_model_type(args)
    if is_default_run and args.limit is None:
        args.limit = DEFAULT_JOB_LIMIT
    use_default_plans = has_default_plans(tasks_of(args).values(), args)
    if not use_default_plans:
        check_weights(args, plans)
    folder = args.run_folder or (DEFAULT_FOLDER if nothing_named else "")  # clip_benchmark writes where it is called
    template = args.output or os.path.join(folder, results.DEFAULT_OUTPUT)
    device = find_device(args.device, processes.local_rank)
    if processes.size > 1 and any(name.startswith("tfds/") for name in data_registry.dataset_names(args.dataset)):
        raise UserError("tfds/ data sets cannot be read by several processes: run them in one process.")
    models = ModelCache(args, device, warn, processes)

    def plans_of(task: str, model: str, pretrained: str) -> Sequence[Plan]:
        default_plans = TASKS[task].default_plans
        if default_plans is None or has_plan_flags(args):
            return plans
        own_plans: Sequence[Plan]
        own_plans, notes = resolve(default_plans)(models.get(model, pretrained).model)
        for note in notes:
            warn(note)
        return own_plans

    if not use_default_plans and not args.skip_load:
        for model, _ in dict.fromkeys(loading.model_pairs(args.model, args.pretrained, args.pretrained_model, args.model_type)):
            check_plans(model, args.model_type, plans, args.strict)
    jobs = list_jobs(args, plans_of, template)
    warn_unused_flags(args, {job.task for job in jobs}, warn)
    for job in jobs:
        for path in job.files.values():
            check_writable(path)

    written: list[Path] = []
    for job in jobs:
        torch.manual_seed(args.seed)
        loaded = models.get(job.model, job.pretrained)
        load_open_clip.set_language(job.model, loaded.tokenizer, job.language)
        written += run_job(job, loaded, args, device, warn, processes)
    return written


class ModelCache:
    """The model that was used last. It is released before another one is loaded."""

    def __init__(self, args: argparse.Namespace, device: torch.device, warn: WarnOnce, processes: Processes) -> None:
        self.args, self.device, self.warn, self.processes = args, device, warn, processes
        self.loaded: Loaded | None = None
        self.names = ("", "")

    def get(self, model: str, pretrained: str) -> Loaded:
        if self.loaded is None or self.names != (model, pretrained):
            self.loaded, self.names = None, (model, pretrained)
            with self.processes.main_first():
                self.loaded = _load(model, pretrained, self.args, self.device)
            for note in self.loaded.notes:
                self.warn(note)
        return self.loaded


def _load(model: str, pretrained: str, args: argparse.Namespace, device: torch.device) -> Loaded:
    if args.skip_load:
        return Loaded(model=None, transform=_as_it_is, tokenizer=_no_tokenizer, fingerprint="")
    return loading.load(
        model,
        pretrained,
        model_type=args.model_type,
        cache_dir=args.model_cache_dir,
        device=device,
        dtype=torch.float32 if args.amp is False else None,
    )


def _as_it_is(image: Any) -> Any:
    return image


def _no_tokenizer(texts: list[str]) -> Any:
    raise AssertionError("with --skip_load no text is read")
