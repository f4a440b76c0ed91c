"""`tokensieve eval`: every model on every data set in every language, under all plans in one pass over the data.

Each batch is encoded under every plan in turn, so that the data is read once and the times are comparable. What can be wrong
with the arguments (names, plans, files that cannot be written) is found before anything is loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tokensieve import results
from tokensieve.data import sources
from tokensieve.data.sources import Batch, Broken, Source
from tokensieve.device import find_device, timed
from tokensieve.errors import Uncuttable, UserError
from tokensieve.flops import gflops
from tokensieve.handle import Handle, PlanWarning, apply
from tokensieve.models import load
from tokensieve.models.load import Loaded
from tokensieve.plan import Plan
from tokensieve.selection import pruning_plan, selection_plan
from tokensieve.tasks import classification

S2_DEFAULT = "anchor(k=10,m=50,alpha=0.5)"
DEFAULT_JOB = ("none", S2_DEFAULT, "random:60", "grid:60")
DEFAULT_FOLDER = "results"
S1_FLAGS = {"token_selection_k": "k", "token_selection_m": "m", "token_selection_alpha": "alpha"}  # flag: its argument
S2_FLAGS = {flag: flag for flag in ("k_anchors", "top_m", "alpha", "prune_layer")}
FULL_SHARE = 0.05  # of the plans' time may go into timing the unreduced model, after one batch, where it is not a plan
# Flags of clip_benchmark that its zero-shot classification does not look at, with their defaults.
OTHER_TASKS: dict[str, Any] = {
    "train_split": ["train"],
    "val_split": None,
    "val_proportion": None,
    "recall_k": [5],
    "fewshot_k": -1,
    "fewshot_epochs": 10,
    "fewshot_lr": 0.1,
    "normalize": True,
    "skip_load": False,
    "feature_root": "features",
    "annotation_file": "",
}


@dataclass(frozen=True)
class Job:
    """One pass over one data set: a model, its weights, a language, and the result file of every plan."""

    model: str
    pretrained: str
    dataset: str
    language: str
    task: str
    files: dict[str, Path]  # by the plan's text


def run(args: argparse.Namespace) -> list[Path]:
    """Do all jobs that the arguments describe; the result files."""
    _check_switches(args)
    bare = not any((args.dataset, args.model, args.pretrained, args.pretrained_model)) and not _plan_flags(args)
    plans = [Plan.parse(text) for text in (DEFAULT_JOB if bare else _plan_texts(args))]
    plans = list({str(plan): plan for plan in plans}.values())
    template = args.output or os.path.join(DEFAULT_FOLDER if bare else "", results.DEFAULT_OUTPUT)
    local_rank, rank, world = world_from_environment() if args.distributed else (0, 0, 1)
    device = find_device(args.device, local_rank)
    say = Speaker()
    jobs = list_jobs(args, plans, template)
    _mention_idle_flags(args, say)
    for job in jobs:
        for path in job.files.values():
            results.check_writable(path)
    if args.distributed:
        random.Random(args.seed).shuffle(jobs)  # as clip_benchmark, so that the work is balanced
        jobs = jobs[rank::world]

    written: list[Path] = []
    loaded: Loaded | None = None
    at_hand = ("", "")
    for job in jobs:
        torch.manual_seed(args.seed)
        if loaded is None or at_hand != (job.model, job.pretrained):
            loaded, at_hand = None, (job.model, job.pretrained)  # the old model goes before the new one comes
            loaded = load.load(*at_hand, model_type=args.model_type, cache_dir=args.model_cache_dir, device=device)
            for note in loaded.notes:
                say(note)
        load.set_language(job.model, loaded.tokenizer, job.language)
        written += run_job(job, plans, loaded, args, device, say, show=args.verbose and rank == 0)
    return written


# ------------------------------------------------------------------------------------------------- what the arguments mean


def _plan_flags(args: argparse.Namespace) -> bool:
    return args.plan is not None or bool(args.compare or args.enable_pruning or args.enable_token_selection)


def _plan_texts(args: argparse.Namespace) -> list[str]:
    """The plans of a run that is not the default one: the one asked for, or none, and those to compare."""
    asked: list[tuple[str, str]] = []
    if args.plan is not None:
        asked.append(("--plan", args.plan))
    if args.enable_pruning:
        asked.append(("--enable_pruning", str(pruning_plan(**_given(args, S2_FLAGS)))))
    if args.enable_token_selection:
        asked.append(("--enable_token_selection", str(selection_plan(**_given(args, S1_FLAGS)))))
    if len(asked) > 1:
        flags = " and ".join(flag for flag, _ in asked)
        raise UserError(f"{flags} exclude each other; put the second plan in --compare: --compare {asked[1][1]!r}")
    return [text for _, text in asked] + ([] if asked else ["none"]) + args.compare


def _check_switches(args: argparse.Namespace) -> None:
    """A setting of S1 or S2 without its switch would be passed over in silence: a UserError."""
    for flags, switch in ((S1_FLAGS, "enable_token_selection"), (S2_FLAGS, "enable_pruning")):
        given = [flag for flag in flags if getattr(args, flag) is not None]
        if given and not getattr(args, switch):
            raise UserError(f"--{given[0]} works with --{switch} only: add --{switch}.")


def _given(args: argparse.Namespace, flags: dict[str, str]) -> dict[str, Any]:
    """The arguments whose flags were typed; the others keep their defaults."""
    return {name: getattr(args, flag) for flag, name in flags.items() if getattr(args, flag) is not None}


def list_jobs(args: argparse.Namespace, plans: Sequence[Plan], template: str) -> list[Job]:
    """All combinations, with every name checked and every result file different."""
    models = load.pairs(args.model, args.pretrained, args.pretrained_model)
    for model, pretrained in models:
        load.check(model, pretrained, args.model_type)
    datasets = sources.names(args.dataset)
    tasks = {name: sources.task_of(name) if args.task == "auto" else args.task for name in datasets}
    for name, task in tasks.items():
        if task != classification.NAME:
            raise UserError(
                f"{name}: the task {task} is not in this version, only {classification.NAME} (one or several labels) is; "
                f"zeroshot_retrieval, linear_probe, captioning and image_caption_selection come later."
            )
    jobs: list[Job] = []
    owner: dict[Path, str] = {}
    for (model, pretrained), dataset, language in dict.fromkeys(product(models, datasets, args.language)):
        names = _names(model, pretrained, dataset, language, tasks[dataset])
        files = {}
        for plan in map(str, plans):
            path = results.result_path(template, plan=plan, several_plans=len(plans) > 1, **names)
            this = f"{model},{pretrained} on {dataset} ({language}, {plan})"
            if path in owner:
                raise UserError(f"--output {template!r} names {path} both for {owner[path]} and for {this}.")
            owner[path], files[plan] = this, path
        jobs.append(Job(model, pretrained, dataset, language, tasks[dataset], files))
    return jobs


def _names(model: str, pretrained: str, dataset: str, language: str, task: str) -> dict[str, str]:
    """What the placeholders of a file name stand for: clip_benchmark's, without separators of folders."""
    is_file = os.path.isfile(pretrained)
    return {
        "model": model.replace("/", "_"),
        "pretrained": os.path.basename(pretrained) if is_file else pretrained.replace("/", "_"),
        "pretrained_full_path": pretrained.replace("/", "_"),
        "task": task,
        "dataset": dataset.removeprefix("wds/").replace("/", "_"),
        "language": language,
    }


def _mention_idle_flags(args: argparse.Namespace, say: Speaker) -> None:
    for flag, default in OTHER_TASKS.items():
        if getattr(args, flag) != default:
            say(f"--{flag} has no effect on {classification.NAME}")


def world_from_environment() -> tuple[int, int, int]:
    """(local rank, rank, number of processes) as torchrun, SLURM or MPI tell them."""

    def first(*variables: str, default: int) -> int:
        return next((int(os.environ[name]) for name in variables if name in os.environ), default)

    return (
        first("LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", default=0),
        first("RANK", "PMI_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", default=0),
        first("WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", default=1),
    )


class Speaker:
    """Says a remark on stderr, each one once."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(self, remark: str) -> None:
        if remark not in self.said:
            self.said.add(remark)
            print(f"tokensieve: {remark}", file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------------- one job


class Arm:
    """One plan on the model: puts itself on for a batch, encodes, takes itself off, and keeps its times."""

    def __init__(self, model: Any, plan: Plan, seed: int, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        self.model, self.plan, self.precision = model, plan, precision
        self.handle: Handle | None = None
        self.reason: str | None = "the plan is none" if plan.is_identity else None
        self.times: list[tuple[int, float]] = []  # images and seconds of every batch
        if not plan.is_identity:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PlanWarning)  # its notes go to stderr and into the result
                    self.handle = apply(model, plan, seed=seed)
                self.handle.remove()
            except Uncuttable as error:
                self.reason = error.reason

    @property
    def notes(self) -> list[str]:
        return list(self.handle.notes) if self.handle else []

    def __call__(self, images: Tensor) -> Tensor:
        features, seconds = timed(partial(self.encode, images), images.device)
        self.times.append((len(images), seconds))
        return features

    def encode(self, images: Tensor) -> Tensor:
        """The features (B,E) under this plan, untimed."""
        if self.handle is not None:
            self.handle.attach()
        try:
            with self.precision():
                features: Tensor = self.model.encode_image(images)
            return features
        finally:
            if self.handle is not None:
                self.handle.remove()

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.times)

    def images_per_second(self) -> float:
        """From the median time of an image over whole batches, the first one (warm-up) left out if there are more."""
        largest = max(n for n, _ in self.times)
        whole = [seconds / n for n, seconds in self.times if n == largest]
        return 1 / statistics.median(whole[1:] or whole)


def run_job(
    job: Job,
    plans: Sequence[Plan],
    loaded: Loaded,
    args: argparse.Namespace,
    device: torch.device,
    say: Speaker,
    show: bool,
) -> list[Path]:
    """One pass over the data; the files that were written."""
    started = time.perf_counter()
    amp = device.type == "cuda" if args.amp is None else args.amp

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, enabled=amp)

    source = sources.build(
        job.dataset,
        loaded.transform,
        root=args.dataset_root,
        split=args.split,
        language=job.language,
        limit=args.limit,
        wds_cache_dir=args.wds_cache_dir,
        custom_classname_file=args.custom_classname_file,
        custom_template_file=args.custom_template_file,
    )
    settings = {
        "seed": args.seed,
        "split": args.split,
        "limit": args.limit,
        "device": str(device),
        "dtype": str(torch.get_autocast_dtype(device.type) if amp else torch.float32).removeprefix("torch."),
        "amp": amp,
        "batch_size": args.batch_size,
        "normalize": True,
        "workers": source.workers(args.num_workers) if source.size is None else None,  # they set the order of a stream
    }
    keys = {plan: _key(job, plan, loaded, source, settings, args.load_clfs) for plan in job.files}
    if args.skip_existing:
        there = [plan for plan, path in job.files.items() if results.stored_key(path) == keys[plan]]
        for plan in there:
            say(f"{job.files[plan]} is there already, made by the same settings: skipped")
        plans = [plan for plan in plans if str(plan) not in there]
        if not plans:
            return []

    arms = [Arm(loaded.model, plan, args.seed, precision) for plan in plans]
    _tell_what_is_not_done(arms, job, args.strict, say)
    full = next((arm for arm in arms if arm.plan.is_identity), None) or Arm(loaded.model, Plan.parse("none"), 0, precision)
    classifier = _classifier(job, loaded, source, args, device, precision, show)
    reading = _Reading(job, source, args, device, show)
    try:
        batches = reading.batches() if full in arms else reading.batches_with(full, arms)
        metrics = classification.evaluate(arms, batches, classifier, precision)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{device} has too little memory for --batch_size {args.batch_size}: try a smaller one.") from error
    reductions = _reductions(arms, full, reading.first_image)

    rows: list[dict[str, Any]] = []
    for numbers, reduction in zip(metrics, reductions, strict=True):
        rows.append(
            {
                "dataset": job.dataset,
                "model": job.model,
                "pretrained": job.pretrained,
                "task": job.task,
                "metrics": numbers,
                "language": job.language,
                **({"classnames": source.classes} if args.dump_classnames else {}),
                **({"templates": source.templates} if args.dump_templates else {}),
                "reduction": reduction,
                "run": {
                    "versions": results.versions(),
                    **settings,
                    "n_samples": reading.n_samples,
                    "n_skipped": len(reading.broken),
                    "seconds": time.perf_counter() - started,
                    "threads": torch.get_num_threads(),
                    "weights": loaded.fingerprint,
                    "data": source.fingerprint,
                    "key": keys[reduction["plan"]],
                },
            }
        )
    files = [job.files[row["reduction"]["plan"]] for row in rows]
    for file, row in zip(files, rows, strict=True):
        results.write_result(file, row)
    if show:
        print_table(job, rows, files)
    return files


def _tell_what_is_not_done(arms: Sequence[Arm], job: Job, strict: bool, say: Speaker) -> None:
    """Say what a plan does not do on this model; with --strict, a plan that is not applied is an error."""
    for arm in arms:
        for note in arm.notes:
            say(note)
        if arm.handle is None and not arm.plan.is_identity:
            if strict:
                raise UserError(f"{arm.plan} cannot be applied to {job.model}: {arm.reason}")
            say(f"{arm.plan} is not applied to {job.model}, the full features are used: {arm.reason}")


def _reductions(arms: Sequence[Arm], full: Arm, image: Tensor | None) -> list[dict[str, Any]]:
    """What every plan did and what it cost, with the unreduced model beside it."""
    assert image is not None
    ledgers = [arm.handle.ledger if arm.handle else [] for arm in arms]  # of the last batch: read before counting runs again
    cost_full = gflops(partial(full.encode, image))
    made = []
    for arm, ledger in zip(arms, ledgers, strict=True):
        patches = ledger[0].tokens_in if ledger else _patches(arm.model)
        made.append(
            {
                "plan": str(arm.plan),
                "applied": arm.handle is not None,
                "reason": arm.reason,
                "layers": [vars(row) for row in ledger],
                "tokens_in": patches,
                "tokens_out": ledger[-1].tokens_out if ledger else patches,
                "gflops": gflops(partial(arm.encode, image)) if arm.handle else cost_full,
                "gflops_full": cost_full,
                "images_per_second": arm.images_per_second(),
                "images_per_second_full": full.images_per_second(),
                "notes": arm.notes,
            }
        )
    return made


def _key(job: Job, plan: str, loaded: Loaded, source: Source, settings: dict[str, Any], classifiers: Sequence[str]) -> str:
    """The same key, the same run: weights, plan, data, language, settings and code."""
    files = [hashlib.sha256(Path(path).read_bytes()).hexdigest() if os.path.isfile(path) else path for path in classifiers]
    code = results.code_version()
    identity = [job.model, loaded.fingerprint, plan, job.dataset, source.fingerprint, job.language, job.task, settings, files]
    return results.digest([*identity, code, results.versions()])


def _classifier(
    job: Job,
    loaded: Loaded,
    source: Source,
    args: argparse.Namespace,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
    show: bool,
) -> Tensor:
    """The classifier (E,C): from --load_clfs, or from the class names; to --save_clf if asked."""
    if args.load_clfs:
        classifier = classification.load_classifiers(args.load_clfs, device)
        if classifier.shape[1] != len(source.classes):
            raise UserError(
                f"{args.load_clfs[0]} is for {classifier.shape[1]} classes, {job.dataset} has {len(source.classes)}."
            )
    else:
        classes = tqdm(source.classes, desc="prompts", unit="class", leave=False, disable=not show)
        classifier = classification.zero_shot_classifier(
            loaded.model, loaded.tokenizer, classes, source.templates, device, precision
        )
    if args.save_clf:
        names = _names(job.model, job.pretrained, job.dataset, job.language, job.task)
        path = Path(results.fill(args.save_clf, "--save_clf", **names))
        results.check_writable(path, "--save_clf")
        if path.exists():
            results.move_aside(path)
        classification.save_classifier(path, classifier)
    return classifier


class _Reading:
    """The way of the data: batches to the device, broken images counted, progress shown."""

    def __init__(self, job: Job, source: Source, args: argparse.Namespace, device: torch.device, show: bool) -> None:
        self.job, self.source, self.args, self.device, self.show = job, source, args, device, show
        self.broken: list[Broken] = []
        self.n_samples = 0
        self.first_image: Tensor | None = None

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(images, targets) of every batch."""
        loader = self.source.loader(self.args.batch_size, self.args.num_workers, pin=self.device.type == "cuda")
        title = f"{self.job.model} on {self.job.dataset}"
        with tqdm(total=self.source.size, desc=title, unit="img", disable=not self.show) as progress:
            for batch in loader:
                self._count(batch)
                if batch.images is None or batch.targets is None:
                    progress.update(len(batch.broken))
                    continue
                images = batch.images.to(self.device, non_blocking=True)
                if self.first_image is None:
                    self.first_image = images[:1].clone()
                yield images, batch.targets
                progress.update(len(batch.broken) + len(batch.targets))
        self._judge(self.n_samples + len(self.broken))

    def batches_with(self, full: Arm, arms: Sequence[Arm]) -> Iterator[tuple[Tensor, Tensor]]:
        """The same, and now and then, never for long, a batch also goes through the unreduced model, to time it."""
        for images, targets in self.batches():
            yield images, targets
            if full.seconds <= FULL_SHARE * sum(arm.seconds for arm in arms):
                full(images)

    def _count(self, batch: Batch) -> None:
        for sample in batch.broken:
            if sample.fatal:
                raise UserError(f"cannot read {sample.name} of {self.job.dataset}: {sample.reason}. Fetch it again.")
        self.broken += batch.broken
        self.n_samples += 0 if batch.targets is None else len(batch.targets)
        if self.source.size is not None and len(self.broken) > self.args.max_broken * self.source.size:
            self._judge(self.source.size)

    def _judge(self, total: int) -> None:
        """Name the broken images; a UserError if they are too many, or if nothing is left."""
        for sample in self.broken[:10]:
            print(f"tokensieve: cannot read {sample.name}: {sample.reason}", file=sys.stderr)
        if len(self.broken) > 10:
            print(f"tokensieve: ... and {len(self.broken) - 10} more", file=sys.stderr)
        if len(self.broken) > self.args.max_broken * total:
            raise UserError(
                f"at least {len(self.broken)} of {total} images of {self.job.dataset} cannot be read, more than "
                f"--max_broken {self.args.max_broken} allows: mend or remove them, or raise --max_broken."
            )
        if self.n_samples == 0:
            state = "has no image that can be read" if self.broken else "is empty"
            raise UserError(f"the data set {self.job.dataset} {state} (split {self.args.split!r}).")


def _patches(model: Any) -> int | None:
    """How many patch tokens the tower works on; None if it has none."""
    grid = getattr(getattr(model, "visual", None), "grid_size", None)
    return grid[0] * grid[1] if grid else None


# -------------------------------------------------------------------------------------------------------------- the table


def print_table(job: Job, rows: Sequence[dict[str, Any]], files: Sequence[Path]) -> None:
    """What was measured, one line a plan, and where it is written."""
    from rich.console import Console
    from rich.table import Table

    run = rows[0]["run"]
    metric = next(iter(rows[0]["metrics"]))
    title = f"{job.model} ({os.path.basename(job.pretrained) or 'random weights'}) on {job.dataset}, {run['n_samples']} images"
    table = Table(title=f"{title}, {run['device']}, {run['dtype']}", title_justify="left")
    table.add_column("plan", overflow="fold")
    for name in ("tokens", metric, "GFLOPs", "images/s", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        done, numbers = row["reduction"], row["metrics"]
        plan = done["plan"] if done["applied"] or done["plan"] == "none" else f"{done['plan']} (not applied)"
        tokens = "-" if done["tokens_in"] is None else f"{done['tokens_in']} -> {done['tokens_out']}"
        table.add_row(
            plan,
            tokens,
            f"{numbers[metric]:.4f} ± {numbers[f'{metric}_stderr']:.4f}",
            f"{done['gflops']:.3g}",
            f"{done['images_per_second']:.1f}",
            f"{done['images_per_second'] / done['images_per_second_full']:.2f}x",
        )
    console = Console()
    console.print(table)
    if len(files) == 1:
        console.print(f"result: {files[0]}", markup=False, highlight=False, soft_wrap=True)
    else:
        folder = files[0].parent
        console.print(f"{len(files)} results in the folder {folder}:", markup=False, highlight=False, soft_wrap=True)
        for file in files:
            console.print(f"  {file.name}", markup=False, highlight=False, soft_wrap=True)
