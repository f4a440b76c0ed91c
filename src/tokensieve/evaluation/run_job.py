"""One job: one task on one data set under all plans. It is prepared, its passes run, and its results are written.

Each batch is encoded under every plan in turn, so that the data is read once and the times are comparable.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensieve import plugins, provenance
from tokensieve.data import registry as data_registry
from tokensieve.data.source import Source
from tokensieve.distributed import Processes
from tokensieve.errors import UserError
from tokensieve.evaluation import results, tables
from tokensieve.evaluation.arguments import check_contents
from tokensieve.evaluation.costs import summarise_reductions
from tokensieve.evaluation.flags import repeated_flags
from tokensieve.evaluation.jobs import Job, template_fields
from tokensieve.evaluation.notices import WarnOnce
from tokensieve.evaluation.passes import PassResult, check_broken_share, first_sample, run_pass
from tokensieve.evaluation.plan_check import refuse_excess
from tokensieve.evaluation.planned_model import Fusion, PlannedModel
from tokensieve.evaluation.remarks import speed_remarks, table_remarks, unchanged_remarks
from tokensieve.evaluation.rows import add_losses, keep_earlier_measurements, make_row, rows_without_model
from tokensieve.flags import Flag
from tokensieve.measuring.clock import describe_machine
from tokensieve.models.loading.loaded import Loaded
from tokensieve.plan import Plan
from tokensieve.registry import resolve
from tokensieve.tasks.base import Prediction, Record, SampleScores, StoredPass, Task, TaskContext
from tokensieve.tasks.registry import TASKS

Precision = Callable[[], AbstractContextManager[Any]]


@dataclass
class Prepared:
    """What is fixed before the first batch of a job."""

    task: Task
    data: dict[str, Source]  # by the name of the pass
    plans: Sequence[Plan]  # those whose results are missing
    models: list[PlannedModel]  # one for each plan; none with --skip_load
    full: PlannedModel  # the model without a plan, to compare with
    settings: dict[str, Any]
    plan_keys: dict[str, str]  # by the plan's text: the plan, and which trained weights it uses
    result_keys: dict[str, str]  # by the plan's text
    fingerprints: list[str]  # of the data


@dataclass
class Passes:
    """The passes of a job: those that ran, and those whose records an earlier run stored."""

    fresh: dict[str, PassResult]
    stored: dict[tuple[str, str], StoredPass | None]  # by the plan's text and the name of the pass


def run_job(
    job: Job,
    loaded: Loaded,
    args: argparse.Namespace,
    device: torch.device,
    warn: WarnOnce,
    processes: Processes,
) -> list[Path]:
    """Run a job; the files that were written (by process 0)."""
    started = time.perf_counter()
    show = not args.quiet and processes.is_main
    prepared = _prepare(job, loaded, args, device, warn, processes, show)
    if not prepared.plans:
        return []
    passes = _run_passes(prepared, job, args, device, processes, show)
    if not processes.is_main:
        return []
    for model in prepared.models:
        for note in model.notes:  # those that depend on the images
            warn(note)
    rows, scores, predictions = _make_rows(prepared, passes, job, args, device, processes)
    unchanged = unchanged_remarks(rows)
    for remark in unchanged if not show else ():
        warn(remark)
    remarks = table_remarks(
        rows,
        scores,
        prepared.task.metric,
        prepared.task.unit,
        by_pruning_flag=args.enable_pruning and args.prune_rest is None,
    )
    remarks += speed_remarks(rows, rows[0]["run"]["busy"])
    return _write(rows, predictions, [*unchanged, *remarks], job, prepared.task, started, show)


# ---------------------------------------------------------------------------------------------------------------- prepare


def _prepare(
    job: Job,
    loaded: Loaded,
    args: argparse.Namespace,
    device: torch.device,
    warn: WarnOnce,
    processes: Processes,
    show: bool,
) -> Prepared:
    own_precision = TASKS[job.task].own_precision
    amp = device.type == "cuda" and not own_precision if args.amp is None else args.amp
    dtype = next((p.dtype for p in loaded.model.parameters()), torch.float32) if own_precision else torch.float32
    precision = partial(torch.autocast, device.type, enabled=amp)
    fusion = _fusion(args)
    context = _task_context(job, loaded, args, device, precision, warn, show, processes.is_main)
    with processes.main_first():
        task: Task = resolve(TASKS[job.task].implementation)(context)
        if args.save_predictions and type(task).predictions is Task.predictions:
            raise UserError(f"--save_predictions: the task {job.task} does not say what it predicts of a sample; leave it out.")
        data = task.sources()
    streamed = [source.workers(args.num_workers) for source in data.values() if source.size is None]
    hashes = plugins.plugin_hashes()
    settings = {
        "model_type": args.model_type,
        "seed": args.seed,
        "split": args.split,
        "limit": args.limit,
        "device": str(device),
        "dtype": str(torch.get_autocast_dtype(device.type) if amp else dtype).removeprefix("torch."),
        "amp": args.amp if own_precision else amp,
        "batch_size": args.batch_size,
        "workers": max(streamed) if streamed else None,  # they set the order of a stream
        **_task_settings(task, TASKS[job.task].flags, context.args),
        **({"plugins": hashes} if hashes else {}),
    }
    models = [] if args.skip_load else [_planned_model(plan, loaded, args, precision, fusion, task) for plan in job.plans]
    plan_keys = {str(plan): str(plan) for plan in job.plans} | {str(model.plan): model.key for model in models}
    fingerprints = [source.fingerprint for source in data.values()]
    identity = [job.model, task.weights, job.dataset, fingerprints, job.language, job.task, settings, vars(fusion)]
    code = [provenance.code_version(), provenance.versions()]
    result_keys = {plan: provenance.digest([*identity, key, *code]) for plan, key in plan_keys.items()}
    plans: Sequence[Plan] = job.plans
    if args.skip_existing:
        found = {plan: results.find_run(path, result_keys[plan], args.save_predictions) for plan, path in job.files.items()}
        existing = processes.broadcast({plan: stored.path for plan, stored in found.items() if stored is not None})
        for path in existing.values():
            warn(f"{path} is there already, made by the same settings: skipped")
        plans = [plan for plan in plans if str(plan) not in existing]
        models = [model for model in models if str(model.plan) not in existing]
    _report_unapplied_plans(models, job, args.strict, warn)
    none = PlannedModel(loaded.model, Plan.parse("none"), 0, precision, run=task.run, run_for_flops=task.run_for_flops)
    full = next((model for model in models if model.plan.is_identity and model.fusion.kind == "cls"), none)
    return Prepared(task, data, plans, models, full, settings, plan_keys, result_keys, fingerprints)


def _fusion(args: argparse.Namespace) -> Fusion:
    """The token fusion of the flags; what was not typed keeps its default."""
    typed = {"weight": args.token_fusion_weight, "temperature": args.token_fusion_temperature}
    return Fusion(args.token_fusion, **{name: value for name, value in typed.items() if value is not None})


def _task_context(
    job: Job,
    loaded: Loaded,
    args: argparse.Namespace,
    device: torch.device,
    precision: Precision,
    warn: WarnOnce,
    show: bool,
    is_main: bool,
) -> TaskContext:
    own_args = copy.copy(args)
    for name, value in job.values.items():
        setattr(own_args, name, value)

    def source(split: str) -> Source:
        opened = data_registry.build_source(
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
            needs_class_names=TASKS[job.task].needs_class_names,
            class_names=args.classnames,
            contents=TASKS[job.task].contents,
        )
        for note in opened.notes:
            warn(note)
        if data_registry.contents_of(job.dataset, TASKS[job.task].contents) is None:  # only now it is known
            check_contents(job.dataset, "captions" if opened.captions else "labels", job.task)
        return opened

    return TaskContext(
        model=job.model,
        pretrained=job.pretrained,
        dataset=job.dataset,
        language=job.language,
        args=own_args,
        loaded=loaded,
        device=device,
        precision=precision,
        show=show,
        warn=warn,
        source=source,
        is_main=is_main,
        file_fields=template_fields(job.model, job.pretrained, job.dataset, job.language, job.task),
        saves_predictions=args.save_predictions,
    )


def _task_settings(task: Task, flags: Sequence[Flag], args: argparse.Namespace) -> dict[str, Any]:
    """The task's own settings, and the values of its flags that separate results, unless the settings have them."""
    own = task.settings()
    declared = {flag.dest: getattr(args, flag.dest) for flag in flags if flag.separates_results}
    return own | {name: value for name, value in declared.items() if name not in own}


def _planned_model(
    plan: Plan, loaded: Loaded, args: argparse.Namespace, precision: Precision, fusion: Fusion, task: Task
) -> PlannedModel:
    return PlannedModel(
        loaded.model,
        plan,
        args.seed,
        precision,
        weights=args.weights if plan.is_trained else None,
        fusion=fusion,
        run=task.run,
        run_for_flops=task.run_for_flops,
    )


def _report_unapplied_plans(models: Sequence[PlannedModel], job: Job, strict: bool, warn: WarnOnce) -> None:
    """Warn of what a plan does not do on this model; with --strict, a plan that is not applied is an error."""
    for model in models:
        for note in model.notes:
            warn(note)
        if strict and model.handle is not None:
            refuse_excess(model.handle)
        if model.is_unsupported:
            if strict:
                raise UserError(f"{model.plan} cannot be applied to {job.model}: {model.reason}")
            warn(f"{model.plan} is not applied to {job.model}, the full features are used: {model.reason}")


# ------------------------------------------------------------------------------------------------------------- run passes


def _run_passes(
    prepared: Prepared,
    job: Job,
    args: argparse.Namespace,
    device: torch.device,
    processes: Processes,
    show: bool,
) -> Passes:
    """Run the passes whose records are not stored, and store what the task stores."""
    task, data, keys = prepared.task, prepared.data, prepared.plan_keys
    plans = [str(plan) for plan in prepared.plans]
    stored: dict[tuple[str, str], StoredPass | None] = {}
    if processes.is_main:
        stored = {(plan, split): task.stored(keys[plan], split) for plan in plans for split in data}
    missing = {split: [plan for plan in plans if stored[plan, split] is None] for split in data} if stored else None
    pending: dict[str, list[str]] = processes.broadcast(missing)
    if args.skip_load and any(pending.values()):
        without = sorted({plan for waiting in pending.values() for plan in waiting})
        raise UserError(f"--skip_load: there are no features for {', '.join(without)}; run once without --skip_load.")
    if any(pending.values()):
        task.prepare()
    fresh = {}
    for split, source in data.items():
        models = [model for model in prepared.models if str(model.plan) in pending[split]]
        fresh[split] = run_pass(split, source, task, models, prepared.full, job, args, device, show, processes)
        for plan, records in fresh[split].records.items():
            task.store(keys[plan], split, records, fresh[split].samples, fresh[split].broken)
    return Passes(fresh, stored)


# ------------------------------------------------------------------------------------------------------------------ write


def _make_rows(
    prepared: Prepared,
    passes: Passes,
    job: Job,
    args: argparse.Namespace,
    device: torch.device,
    processes: Processes,
) -> tuple[list[dict[str, Any]], list[SampleScores | None], list[list[Prediction] | None]]:
    """One result for each plan, the scores of its samples, and what it predicts of them if that is to be saved."""
    task, data = prepared.task, prepared.data
    if args.skip_load:
        reductions = rows_without_model(prepared.plans)
    else:
        sample = task.timed_inputs(first_sample(data, device))
        reductions = summarise_reductions(prepared.models, prepared.full, sample, task.tokens(sample), task.language_model())
    marks = prepared.fingerprints
    repeated = {flag.dest: getattr(args, flag.dest) for flag in repeated_flags() if getattr(args, flag.dest) != flag.default}
    busy = describe_machine([])["warning"]
    rows, scores, predictions = [], [], []
    for plan, reduction in zip(map(str, prepared.plans), reductions, strict=True):
        records, samples, n_broken = _records_of(plan, passes, args, job)
        scores.append(task.sample_scores(records))
        made = task.predictions(records, samples) if args.save_predictions else None
        predictions.append(_with_names(made, next(reversed(data.values())).names))
        run = {
            "versions": provenance.versions(),
            **prepared.settings,
            "n_samples": len(samples[list(data)[-1]]),
            "n_skipped": n_broken,
            "samples": {split: len(numbers) for split, numbers in samples.items()},
            **task.counts(records),
            "processes": processes.size,
            "seconds": 0.0,
            "time": "",
            "threads": torch.get_num_threads(),
            "busy": busy,
            "weights": task.weights,
            "data": marks[0] if len(marks) == 1 else marks,
            "arguments": repeated,
            "key": prepared.result_keys[plan],
        }
        rows.append(make_row(job, task, records, reduction, run, args, data))
    add_losses(rows, scores)
    return rows, scores, predictions


def _with_names(predictions: list[Prediction] | None, names: Sequence[str]) -> list[Prediction] | None:
    """The predictions with the name of each sample as "file", where samples have names."""
    if predictions is None or not names:
        return predictions
    return [{"sample": line["sample"], "file": names[line["sample"]], **line} for line in predictions]


def _records_of(
    plan: str, passes: Passes, args: argparse.Namespace, job: Job
) -> tuple[dict[str, list[Record]], dict[str, Tensor], int]:
    """The records and the numbers of the samples of every pass under a plan, and how many images could not be read."""
    records, samples, n_broken = {}, {}, 0
    for split, fresh in passes.fresh.items():
        stored = passes.stored[plan, split]
        if stored is None:
            records[split], samples[split], broken = fresh.records[plan], fresh.samples, fresh.broken
        else:
            records[split], samples[split], broken = stored.records, stored.samples, stored.broken
            n_samples = len(stored.samples)
            check_broken_share(broken, n_samples, n_samples + len(broken), args.max_broken, job.dataset)
        n_broken += len(broken)
    return records, samples, n_broken


def _write(
    rows: Sequence[dict[str, Any]],
    predictions: Sequence[list[Prediction] | None],
    remarks: Sequence[str],
    job: Job,
    task: Task,
    started: float,
    show: bool,
) -> list[Path]:
    """Write the results, and print them if they are to be shown; the files."""
    files = []
    for row, of_samples in zip(rows, predictions, strict=True):
        path, run = job.files[row["reduction"]["plan"]], row["run"]
        earlier = results.find_run(path, run["key"])
        run |= {"seconds": time.perf_counter() - started, "time": results.time_after(earlier)}
        files.append(results.write_result(path, keep_earlier_measurements(row, earlier), of_samples))
    if show:
        tables.print_table(rows, task.metric, task.unit)
        tables.print_lines(remarks)
        task.show(rows)
        tables.print_files(files)
    return files
