"""`tokensieve eval`: every model on every data set in every language, under all plans in one pass over the data.

Each batch is encoded under every plan in turn, so that the data is read once and the times are comparable. What can be wrong
with the arguments (names, plans, files that cannot be written) is found before anything is loaded. Several processes share the
batches of every data set; process 0 puts the records in order, computes the numbers and writes.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from tokensieve import provenance
from tokensieve.data import registry as data_registry
from tokensieve.data.source import Source
from tokensieve.device import find_device
from tokensieve.distributed import Processes, join_processes
from tokensieve.errors import UserError
from tokensieve.evaluation import results, tables
from tokensieve.evaluation.arguments import (
    CLASSIFICATION,
    DEFAULT_JOB,
    FLAGS_TO_REPEAT,
    TASKS,
    check_switches,
    check_weights,
    has_plan_flags,
    requested_plans,
    resolve_task_and_model_type,
    warn_unused_flags,
)
from tokensieve.evaluation.costs import summarise_reductions
from tokensieve.evaluation.jobs import Job, list_jobs, template_fields
from tokensieve.evaluation.notices import WarnOnce
from tokensieve.evaluation.passes import check_broken_share, first_sample, run_pass
from tokensieve.evaluation.planned_model import Fusion, PlannedModel
from tokensieve.evaluation.rows import keep_earlier_measurements, make_row, rows_without_model
from tokensieve.files import check_writable, format_template
from tokensieve.models import loading
from tokensieve.models.loading import open_clip as load_open_clip
from tokensieve.models.loading.loaded import Loaded
from tokensieve.plan import Plan
from tokensieve.tasks.base import Task, TaskContext

DEFAULT_FOLDER = "results"


def run(args: argparse.Namespace) -> list[Path]:
    """Do all jobs that the arguments describe; the result files (in process 0)."""
    with join_processes(args.distributed, args.timeout) as processes:
        return _run(args, processes)


def _run(args: argparse.Namespace, processes: Processes) -> list[Path]:
    check_switches(args)
    unnamed = not any((args.dataset, args.model, args.pretrained, args.pretrained_model)) and not has_plan_flags(args)
    bare = unnamed and args.task == "auto" and args.model_type == "open_clip" and args.token_fusion == "cls"
    plans = [Plan.parse(text) for text in (DEFAULT_JOB if bare else requested_plans(args))]
    plans = list({str(plan): plan for plan in plans}.values())
    args = resolve_task_and_model_type(args)
    its_own = args.model_type == "reid" and not has_plan_flags(
        args
    )  # each model is compared under the plan it was trained with
    if not its_own:
        check_weights(args, plans)
    in_folder = bare or (unnamed and its_own)
    template = args.output or os.path.join(DEFAULT_FOLDER if in_folder else "", results.DEFAULT_OUTPUT)
    device = find_device(args.device, processes.local_rank)
    if processes.size > 1 and any(name.startswith("tfds/") for name in data_registry.dataset_names(args.dataset)):
        raise UserError("tfds/ data sets share themselves among processes in a way of their own: run them in one process.")
    say = WarnOnce(silent=not processes.is_main)
    shelf = ModelCache(args, device, say, processes)

    def plans_of(model: str, pretrained: str) -> Sequence[Plan]:
        if not its_own:
            return plans
        from tokensieve.reid.task import default_plans

        found, remarks = default_plans(shelf.take(model, pretrained).model)
        for remark in remarks:
            say(remark)
        return found

    jobs = list_jobs(args, plans_of, template)
    warn_unused_flags(args, {job.task for job in jobs}, say)
    for job in jobs:
        for path in job.files.values():
            check_writable(path)

    written: list[Path] = []
    for job in jobs:
        torch.manual_seed(args.seed)
        loaded = shelf.take(job.model, job.pretrained)
        load_open_clip.set_language(job.model, loaded.tokenizer, job.language)
        written += run_job(job, loaded, args, device, say, processes)
    return written


class ModelCache:
    """The model at hand: an old one goes before a new one comes."""

    def __init__(self, args: argparse.Namespace, device: torch.device, say: WarnOnce, processes: Processes) -> None:
        self.args, self.device, self.say, self.processes = args, device, say, processes
        self.loaded: Loaded | None = None
        self.names = ("", "")

    def take(self, model: str, pretrained: str) -> Loaded:
        if self.loaded is None or self.names != (model, pretrained):
            self.loaded, self.names = None, (model, pretrained)
            with self.processes.main_first():
                self.loaded = _load(model, pretrained, self.args, self.device)
            for note in self.loaded.notes:
                self.say(note)
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


def run_job(
    job: Job,
    loaded: Loaded,
    args: argparse.Namespace,
    device: torch.device,
    say: WarnOnce,
    processes: Processes,
) -> list[Path]:
    """One task on one data set under all plans; the files that were written (by process 0)."""
    started = time.perf_counter()
    plans: Sequence[Plan] = job.plans
    show = args.verbose and processes.is_main
    amp = device.type == "cuda" and args.model_type != "vlm" if args.amp is None else args.amp
    weights = next((p.dtype for p in loaded.model.parameters()), torch.float32) if args.model_type == "vlm" else torch.float32

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, enabled=amp)

    fusion = Fusion(args.token_fusion, 0.8 if args.token_fusion_weight is None else args.token_fusion_weight)
    setup = _task_context(job, loaded, args, device, precision, say, show)
    if not processes.is_main:
        setup.save_clf = None  # process 0 writes
    with processes.main_first():
        task = _task(job.task)(setup)
        data = task.sources()
    streamed = [source.workers(args.num_workers) for source in data.values() if source.size is None]
    settings = {
        "model_type": args.model_type,
        "seed": args.seed,
        "split": args.split,
        "limit": args.limit,
        "device": str(device),
        "dtype": str(torch.get_autocast_dtype(device.type) if amp else weights).removeprefix("torch."),
        "amp": args.amp if args.model_type == "vlm" else amp,
        "batch_size": args.batch_size,
        "workers": max(streamed) if streamed else None,  # they set the order of a stream
        **task.settings(),
    }
    arms = [] if args.skip_load else _planned_models(plans, loaded, args, precision, fusion, task)
    keys = {str(plan): str(plan) for plan in plans} | {str(arm.plan): arm.key for arm in arms}
    marks = [source.fingerprint for source in data.values()]
    identity = [job.model, task.weights, job.dataset, marks, job.language, job.task, settings, vars(fusion)]
    code = [provenance.code_version(), provenance.versions()]
    stamps = {plan: provenance.digest([*identity, key, *code]) for plan, key in keys.items()}
    if args.skip_existing:
        there = processes.broadcast([plan for plan, path in job.files.items() if results.stored_key(path) == stamps[plan]])
        for plan in there:
            say(f"{job.files[plan]} is there already, made by the same settings: skipped")
        plans = [plan for plan in plans if str(plan) not in there]
        arms = [arm for arm in arms if str(arm.plan) not in there]
        if not plans:
            return []
    _report_unapplied_plans(arms, job, args.strict, say)
    none = PlannedModel(loaded.model, Plan.parse("none"), 0, precision, act=task.act, once=task.once)
    full = next((arm for arm in arms if arm.plan.is_identity and arm.fusion.kind == "cls"), none)

    kept = (
        {(text, split): task.stored(keys[text], split) for text in map(str, plans) for split in data}
        if processes.is_main
        else {}
    )
    pending = processes.broadcast(
        {split: [str(p) for p in plans if kept[str(p), split] is None] for split in data} if kept else None
    )
    if args.skip_load and any(pending.values()):
        missing = sorted({plan for plans in pending.values() for plan in plans})
        raise UserError(f"--skip_load: there are no features for {', '.join(missing)}; run once without --skip_load.")
    if any(pending.values()):
        task.prepare()
    passes = {}
    for split, source in data.items():
        waiting = [arm for arm in arms if str(arm.plan) in pending[split]]
        passes[split] = run_pass(split, source, task, waiting, full, job, args, device, show, processes)
        for plan, fresh in passes[split].records.items():
            task.store(keys[plan], split, fresh, passes[split].broken)
    if not processes.is_main:
        return []
    for arm in arms:
        for note in arm.notes:  # what only the images could tell
            say(note)

    rows = []
    if args.skip_load:
        made = rows_without_model(plans)
    else:
        sample = task.timed_inputs(first_sample(data, device))
        made = summarise_reductions(arms, full, sample, task.tokens(sample), task.language_model())
    for text, reduction in zip(map(str, plans), made, strict=True):
        records, samples, broken = {}, {}, 0
        for split, done in passes.items():
            earlier = kept[text, split]
            if earlier is None:
                records[split], samples[split], bad = done.records[text], done.n_samples, done.broken
            else:
                records[split], samples[split], bad = earlier.records, earlier.n_samples, earlier.broken
                check_broken_share(bad, samples[split], samples[split] + len(bad), args.max_broken, job.dataset)
            broken += len(bad)
        run = {
            "versions": provenance.versions(),
            **settings,
            "n_samples": samples[list(data)[-1]],
            "n_skipped": broken,
            "samples": samples,
            **task.counts(records),
            "processes": processes.size,
            "seconds": 0.0,
            "threads": torch.get_num_threads(),
            "weights": task.weights,
            "data": marks[0] if len(marks) == 1 else marks,
            "arguments": {
                flag: value for flag, default in FLAGS_TO_REPEAT.items() if (value := getattr(args, flag)) != default
            },
            "key": stamps[text],
        }
        rows.append(make_row(job, task, records, reduction, run, args, data))
    for row in rows:
        row["run"]["seconds"] = time.perf_counter() - started
    files = [job.files[row["reduction"]["plan"]] for row in rows]
    for file, row in zip(files, rows, strict=True):
        results.write_result(file, keep_earlier_measurements(row, file))
    if show:
        tables.print_table(rows, task.metric, task.unit)
        task.show(rows)
        tables.print_files(files)
    return files


def _task(name: str) -> Callable[[TaskContext], Task]:
    file, kind = TASKS[name]
    place = file.removeprefix("../") if file.startswith("../") else f"tasks.{file}"
    made: Callable[[TaskContext], Task] = getattr(importlib.import_module(f"tokensieve.{place}"), kind)
    return made


def _task_context(
    job: Job,
    loaded: Loaded,
    args: argparse.Namespace,
    device: torch.device,
    precision: Any,
    say: WarnOnce,
    show: bool,
) -> TaskContext:
    own = copy.copy(args)
    for flag, value in job.splits.items():
        setattr(own, flag, value)

    def source(split: str) -> Source:
        return data_registry.build_source(
            job.dataset,
            loaded.transform,
            root=args.dataset_root,
            split=split,
            language=job.language,
            limit=args.limit,
            wds_cache_dir=args.wds_cache_dir,
            custom_classname_file=args.custom_classname_file,
            custom_template_file=args.custom_template_file,
            task=job.task,
            annotation_file=args.annotation_file,
        )

    save_clf = None
    if args.save_clf and job.task == CLASSIFICATION:
        names = template_fields(job.model, job.pretrained, job.dataset, job.language, job.task)
        save_clf = Path(format_template(args.save_clf, "--save_clf", **names))
        check_writable(save_clf, "--save_clf")
    return TaskContext(
        model=job.model,
        pretrained=job.pretrained,
        dataset=job.dataset,
        language=job.language,
        args=own,
        loaded=loaded,
        device=device,
        precision=precision,
        show=show,
        say=say,
        source=source,
        save_clf=save_clf,
    )


def _planned_models(
    plans: Sequence[Plan], loaded: Loaded, args: argparse.Namespace, precision: Any, fusion: Fusion, task: Task
) -> list[PlannedModel]:
    arms = []
    for plan in plans:
        weights = args.weights if plan.is_trained else None
        arms.append(
            PlannedModel(loaded.model, plan, args.seed, precision, weights=weights, fusion=fusion, act=task.act, once=task.once)
        )
    return arms


def _report_unapplied_plans(arms: Sequence[PlannedModel], job: Job, strict: bool, say: WarnOnce) -> None:
    """Say what a plan does not do on this model; with --strict, a plan that is not applied is an error."""
    for arm in arms:
        for note in arm.notes:
            say(note)
        if arm.refused:
            if strict:
                raise UserError(f"{arm.plan} cannot be applied to {job.model}: {arm.reason}")
            say(f"{arm.plan} is not applied to {job.model}, the full features are used: {arm.reason}")
