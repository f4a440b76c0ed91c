"""`tokensieve eval`: every model on every data set in every language, under all plans in one pass over the data.

Each batch is encoded under every plan in turn, so that the data is read once and the times are comparable. What can be wrong
with the arguments (names, plans, files that cannot be written) is found before anything is loaded. Several processes share the
batches of every data set; process 0 puts the records in order, computes the numbers and writes.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensieve import results, table
from tokensieve.arms import Arm, Fusion, reductions
from tokensieve.data import sources
from tokensieve.data.sources import Batch, Broken, Inputs, Source
from tokensieve.device import find_device
from tokensieve.distributed import World, world
from tokensieve.errors import UserError
from tokensieve.methods import REGISTRY
from tokensieve.models import load, load_reid, load_vlm
from tokensieve.models.load import Loaded
from tokensieve.plan import Plan
from tokensieve.reading import Reading, judge, moved
from tokensieve.selection import pruning_plan, selection_plan
from tokensieve.tasks import Record, Setup, Task

CLASSIFICATION, LINEAR_PROBE, VQA, REID = "zeroshot_classification", "linear_probe", "vqa", "reid"
TASKS = {  # name: its file in tasks/ and its class there
    CLASSIFICATION: ("classification", "ClassificationTask"),
    "zeroshot_retrieval": ("retrieval", "RetrievalTask"),
    LINEAR_PROBE: ("linear_probe", "LinearProbeTask"),
    "image_caption_selection": ("caption_selection", "CaptionSelectionTask"),
    "captioning": ("captioning", "CaptioningTask"),
    VQA: ("vqa", "VqaTask"),
    REID: ("reid", "ReidTask"),
}
S2_DEFAULT = "anchor(k=10,m=50,alpha=0.5)"
DEFAULT_JOB = ("none", S2_DEFAULT, "random:60", "grid:60")
DEFAULT_FOLDER = "results"
S1_FLAGS = {"token_selection_k": "k", "token_selection_m": "m", "token_selection_alpha": "alpha"}  # flag: its argument
S2_FLAGS = {flag: flag for flag in ("k_anchors", "top_m", "alpha", "prune_layer")}
FULL_SHARE = 0.05  # of the plans' time may go into timing the unreduced model, after one batch, where it is not a plan
# Flags that a result is not known by (files are, by their content), but that are needed to make it again; their defaults.
REPEATED: dict[str, Any] = {
    "dataset_root": "root",
    "weights": None,
    "custom_classname_file": None,
    "custom_template_file": None,
    "load_clfs": [],
    "annotation_file": "",
    "questions": None,
    "annotations": None,
    "images": None,
    "max_broken": 0.01,
}
# Flags that some tasks alone look at: which, and the default.
TASK_FLAGS: dict[str, tuple[tuple[str, ...], Any]] = {
    "recall_k": (("zeroshot_retrieval",), [5]),
    "annotation_file": (("zeroshot_retrieval", "image_caption_selection", "captioning"), ""),
    "train_split": ((LINEAR_PROBE,), ["train"]),
    "val_split": ((LINEAR_PROBE,), None),
    "val_proportion": ((LINEAR_PROBE,), None),
    "fewshot_k": ((LINEAR_PROBE,), -1),
    "fewshot_epochs": ((LINEAR_PROBE,), 10),
    "fewshot_lr": ((LINEAR_PROBE,), 0.1),
    "normalize": ((LINEAR_PROBE,), True),
    "feature_root": ((LINEAR_PROBE,), "features"),
    "save_clf": ((CLASSIFICATION,), None),
    "load_clfs": ((CLASSIFICATION,), []),
    "questions": ((VQA,), None),
    "annotations": ((VQA,), None),
    "images": ((VQA,), None),
    "vqa_prompt": ((VQA,), None),
    "max_new_tokens": ((VQA,), 16),
    "blind": ((VQA,), False),
    "modalities": ((REID,), None),
    "val_identities": ((REID,), None),
}


@dataclass(frozen=True)
class Kind:
    """A task with data and models of its own, which go with no other task."""

    task: str
    model_type: str
    dataset: str  # what ships
    has: str  # what its data has
    model: str  # what its models do
    knows: Callable[[str], bool]  # whether a name is one of its models, where that can be told


KINDS = (
    Kind(
        VQA,
        "vlm",
        "embedded-questions",
        "questions",
        "a vision-language model answers questions",
        lambda name: name == load_vlm.EMBEDDED,
    ),
    Kind(
        REID,
        "reid",
        "embedded-reid",
        "objects to be found again",
        "a re-identification model finds objects again",
        lambda name: name == load_reid.EMBEDDED or load_reid.is_model(name),
    ),
)


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


def run(args: argparse.Namespace) -> list[Path]:
    """Do all jobs that the arguments describe; the result files (in process 0)."""
    with world(args.distributed, args.timeout) as here:
        return _run(args, here)


def _run(args: argparse.Namespace, here: World) -> list[Path]:
    _check_switches(args)
    unnamed = not any((args.dataset, args.model, args.pretrained, args.pretrained_model)) and not _plan_flags(args)
    bare = unnamed and args.task == "auto" and args.model_type == "open_clip" and args.token_fusion == "cls"
    plans = [Plan.parse(text) for text in (DEFAULT_JOB if bare else _plan_texts(args))]
    plans = list({str(plan): plan for plan in plans}.values())
    args = settled(args)
    its_own = args.model_type == "reid" and not _plan_flags(args)  # each model is compared under the plan it was trained with
    if not its_own:
        _check_weights(args, plans)
    in_folder = bare or (unnamed and its_own)
    template = args.output or os.path.join(DEFAULT_FOLDER if in_folder else "", results.DEFAULT_OUTPUT)
    device = find_device(args.device, here.local_rank)
    if here.size > 1 and any(name.startswith("tfds/") for name in sources.names(args.dataset)):
        raise UserError("tfds/ data sets share themselves among processes in a way of their own: run them in one process.")
    say = Speaker(silent=not here.leads)
    shelf = Shelf(args, device, say, here)

    def plans_of(model: str, pretrained: str) -> Sequence[Plan]:
        if not its_own:
            return plans
        from tokensieve.tasks.reid import default_plans

        found, remarks = default_plans(shelf.take(model, pretrained).model)
        for remark in remarks:
            say(remark)
        return found

    jobs = list_jobs(args, plans_of, template)
    _mention_idle_flags(args, {job.task for job in jobs}, say)
    for job in jobs:
        for path in job.files.values():
            results.check_writable(path)

    written: list[Path] = []
    for job in jobs:
        torch.manual_seed(args.seed)
        loaded = shelf.take(job.model, job.pretrained)
        load.set_language(job.model, loaded.tokenizer, job.language)
        written += run_job(job, loaded, args, device, say, here)
    return written


class Shelf:
    """The model at hand: an old one goes before a new one comes."""

    def __init__(self, args: argparse.Namespace, device: torch.device, say: Speaker, here: World) -> None:
        self.args, self.device, self.say, self.here = args, device, say, here
        self.loaded: Loaded | None = None
        self.names = ("", "")

    def take(self, model: str, pretrained: str) -> Loaded:
        if self.loaded is None or self.names != (model, pretrained):
            self.loaded, self.names = None, (model, pretrained)
            with self.here.first():
                self.loaded = _load(model, pretrained, self.args, self.device)
            for note in self.loaded.notes:
                self.say(note)
        return self.loaded


def _load(model: str, pretrained: str, args: argparse.Namespace, device: torch.device) -> Loaded:
    if args.skip_load:
        return Loaded(model=None, transform=_as_it_is, tokenizer=_no_tokenizer, fingerprint="")
    if args.model_type == "vlm":
        dtype = torch.float32 if args.amp is False else None
        return load_vlm.load(model, device, dtype, cache_dir=args.model_cache_dir, revision=pretrained)
    return load.load(model, pretrained, model_type=args.model_type, cache_dir=args.model_cache_dir, device=device)


def _as_it_is(image: Any) -> Any:
    return image


def _no_tokenizer(texts: list[str]) -> Any:
    raise AssertionError("with --skip_load no text is read")


# ------------------------------------------------------------------------------------------------- what the arguments mean


def settled(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with what others decide filled in: questions need a model that answers, such a model needs questions."""
    made = copy.copy(args)
    meant = [kind for kind in KINDS if args.task == kind.task or args.model_type == kind.model_type]
    meant += [kind for kind in KINDS if any(map(kind.knows, args.model or []))]
    if not args.dataset and meant:
        made.dataset = [meant[0].dataset]
    tasks = {name: sources.task_of(name) if args.task == "auto" else args.task for name in sources.names(made.dataset)}
    for (name, task), kind in product(tasks.items(), KINDS):
        if (task == kind.task) != (sources.own_task(name) == kind.task):
            none = (f"no {kind.has}", f"--dataset {kind.dataset}")
            what, use = none if task == kind.task else (kind.has, f"--task {kind.task}")
            raise UserError(f"{name} has {what}, so the task cannot be {task}: give {use}.")
    kinds = [kind for kind in KINDS if kind.task in tasks.values()]
    if amiss := [kind for kind in meant if kind not in kinds]:
        raise UserError(f"{amiss[0].model}: give --dataset {amiss[0].dataset}, not {', '.join(tasks)}.")
    if not kinds:
        return made
    kind = kinds[0]
    if len(set(tasks.values())) > 1:
        others = [name for name, task in tasks.items() if task != kind.task]
        raise UserError(
            f"{kind.has} need a model of their own kind, {', '.join(others)} another one: run them one after another."
        )
    if args.model_type not in ("open_clip", kind.model_type):
        raise UserError(
            f"--model_type {args.model_type}: the task {kind.task} needs {kind.model_type}; leave --model_type out."
        )
    if args.token_fusion != "cls":
        raise UserError(
            f"--token_fusion {args.token_fusion} makes image features, and the task {kind.task} has none; leave it out."
        )
    made.model_type = kind.model_type
    return made


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
    if args.token_fusion_weight is not None and args.token_fusion != "weighted":
        raise UserError("--token_fusion_weight works with --token_fusion weighted only: add it.")


def _given(args: argparse.Namespace, flags: dict[str, str]) -> dict[str, Any]:
    """The arguments whose flags were typed; the others keep their defaults."""
    return {name: getattr(args, flag) for flag, name in flags.items() if getattr(args, flag) is not None}


def _check_weights(args: argparse.Namespace, plans: Sequence[Plan]) -> None:
    """Weights that no plan asks for would be passed over in silence: a UserError."""
    if args.weights and not any(plan.is_trained for plan in plans):
        trained = ", ".join(name for name, method in REGISTRY.items() if method.part)
        raise UserError(f"--weights {args.weights[0]}: no method of the plan is a trained one ({trained}).")


def list_jobs(args: argparse.Namespace, plans_of: Callable[[str, str], Sequence[Plan]], template: str) -> list[Job]:
    """All combinations, with every name checked and every result file different. plans_of: those of a model."""
    models = load.pairs(args.model, args.pretrained, args.pretrained_model, args.model_type)
    for model, pretrained in models:
        load.check(model, pretrained, args.model_type)
    datasets = sources.names(args.dataset)
    tasks = {name: sources.task_of(name) if args.task == "auto" else args.task for name in datasets}
    for name, task in tasks.items():
        if args.skip_load and task != LINEAR_PROBE:
            raise UserError(f"--skip_load works with --task {LINEAR_PROBE} only, not with {task} ({name}).")
    splits = _splits(args, datasets)
    jobs: list[Job] = []
    owner: dict[Path, str] = {}
    for (model, pretrained), dataset, language in dict.fromkeys(product(models, datasets, args.language)):
        names = _names(model, pretrained, dataset, language, f"{tasks[dataset]}{'_blind' * args.blind}")
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


def _names(model: str, pretrained: str, dataset: str, language: str, task: str) -> dict[str, str]:
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


def _mention_idle_flags(args: argparse.Namespace, tasks: set[str], say: Speaker) -> None:
    for flag, (users, default) in TASK_FLAGS.items():
        if not tasks.intersection(users) and getattr(args, flag) != default:
            say(f"--{flag} has no effect on {', '.join(sorted(tasks))}")


class Speaker:
    """Says a remark on stderr, each one once; process 0 speaks for all."""

    def __init__(self, silent: bool = False) -> None:
        self.said: set[str] = set()
        self.silent = silent

    def __call__(self, remark: str) -> None:
        if remark not in self.said and not self.silent:
            self.said.add(remark)
            print(f"tokensieve: {remark}", file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------------- one job


def run_job(
    job: Job,
    loaded: Loaded,
    args: argparse.Namespace,
    device: torch.device,
    say: Speaker,
    here: World,
) -> list[Path]:
    """One task on one data set under all plans; the files that were written (by process 0)."""
    started = time.perf_counter()
    plans: Sequence[Plan] = job.plans
    show = args.verbose and here.leads
    amp = device.type == "cuda" and args.model_type != "vlm" if args.amp is None else args.amp
    weights = next((p.dtype for p in loaded.model.parameters()), torch.float32) if args.model_type == "vlm" else torch.float32

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, enabled=amp)

    fusion = Fusion(args.token_fusion, 0.8 if args.token_fusion_weight is None else args.token_fusion_weight)
    setup = _setup(job, loaded, args, device, precision, say, show)
    if not here.leads:
        setup.save_clf = None  # process 0 writes
    with here.first():
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
    arms = [] if args.skip_load else _arms(plans, loaded, args, precision, fusion, task)
    keys = {str(plan): str(plan) for plan in plans} | {str(arm.plan): arm.key for arm in arms}
    marks = [source.fingerprint for source in data.values()]
    identity = [job.model, task.weights, job.dataset, marks, job.language, job.task, settings, vars(fusion)]
    code = [results.code_version(), results.versions()]
    stamps = {plan: results.digest([*identity, key, *code]) for plan, key in keys.items()}
    if args.skip_existing:
        there = here.share([plan for plan, path in job.files.items() if results.stored_key(path) == stamps[plan]])
        for plan in there:
            say(f"{job.files[plan]} is there already, made by the same settings: skipped")
        plans = [plan for plan in plans if str(plan) not in there]
        arms = [arm for arm in arms if str(arm.plan) not in there]
        if not plans:
            return []
    _tell_what_is_not_done(arms, job, args.strict, say)
    none = Arm(loaded.model, Plan.parse("none"), 0, precision, act=task.act, once=task.once)
    full = next((arm for arm in arms if arm.plan.is_identity and arm.fusion.kind == "cls"), none)

    kept = {(text, split): task.stored(keys[text], split) for text in map(str, plans) for split in data} if here.leads else {}
    pending = here.share({split: [str(p) for p in plans if kept[str(p), split] is None] for split in data} if kept else None)
    if args.skip_load and any(pending.values()):
        missing = sorted({plan for plans in pending.values() for plan in plans})
        raise UserError(f"--skip_load: there are no features for {', '.join(missing)}; run once without --skip_load.")
    if any(pending.values()):
        task.prepare()
    passes = {}
    for split, source in data.items():
        waiting = [arm for arm in arms if str(arm.plan) in pending[split]]
        passes[split] = _pass_over(split, source, task, waiting, full, job, args, device, show, here)
        for plan, fresh in passes[split].records.items():
            task.store(keys[plan], split, fresh, passes[split].broken)
    if not here.leads:
        return []
    for arm in arms:
        for note in arm.notes:  # what only the images could tell
            say(note)

    rows = []
    if args.skip_load:
        made = _no_model(plans)
    else:
        sample = task.headlined(_a_sample(data, device))
        made = reductions(arms, full, sample, task.tokens(sample), task.language_model())
    for text, reduction in zip(map(str, plans), made, strict=True):
        records, samples, broken = {}, {}, 0
        for split, done in passes.items():
            earlier = kept[text, split]
            if earlier is None:
                records[split], samples[split], bad = done.records[text], done.n_samples, done.broken
            else:
                records[split], samples[split], bad = earlier.records, earlier.n_samples, earlier.broken
                judge(bad, samples[split], samples[split] + len(bad), args.max_broken, job.dataset)
            broken += len(bad)
        run = {
            "versions": results.versions(),
            **settings,
            "n_samples": samples[list(data)[-1]],
            "n_skipped": broken,
            "samples": samples,
            **task.counts(records),
            "processes": here.size,
            "seconds": 0.0,
            "threads": torch.get_num_threads(),
            "weights": task.weights,
            "data": marks[0] if len(marks) == 1 else marks,
            "arguments": {flag: value for flag, default in REPEATED.items() if (value := getattr(args, flag)) != default},
            "key": stamps[text],
        }
        rows.append(_row(job, task, records, reduction, run, args, data))
    for row in rows:
        row["run"]["seconds"] = time.perf_counter() - started
    files = [job.files[row["reduction"]["plan"]] for row in rows]
    for file, row in zip(files, rows, strict=True):
        results.write_result(file, _with_what_was_measured(row, file))
    if show:
        table.print_table(rows, task.metric, task.unit)
        task.show(rows)
        table.print_files(files)
    return files


def _task(name: str) -> Callable[[Setup], Task]:
    file, kind = TASKS[name]
    made: Callable[[Setup], Task] = getattr(importlib.import_module(f"tokensieve.tasks.{file}"), kind)
    return made


def _setup(
    job: Job,
    loaded: Loaded,
    args: argparse.Namespace,
    device: torch.device,
    precision: Any,
    say: Speaker,
    show: bool,
) -> Setup:
    own = copy.copy(args)
    for flag, value in job.splits.items():
        setattr(own, flag, value)

    def source(split: str) -> Source:
        return sources.build(
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
        names = _names(job.model, job.pretrained, job.dataset, job.language, job.task)
        save_clf = Path(results.fill(args.save_clf, "--save_clf", **names))
        results.check_writable(save_clf, "--save_clf")
    return Setup(
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


def _arms(
    plans: Sequence[Plan], loaded: Loaded, args: argparse.Namespace, precision: Any, fusion: Fusion, task: Task
) -> list[Arm]:
    arms = []
    for plan in plans:
        weights = args.weights if plan.is_trained else None
        arms.append(Arm(loaded.model, plan, args.seed, precision, weights=weights, fusion=fusion, act=task.act, once=task.once))
    return arms


def _tell_what_is_not_done(arms: Sequence[Arm], job: Job, strict: bool, say: Speaker) -> None:
    """Say what a plan does not do on this model; with --strict, a plan that is not applied is an error."""
    for arm in arms:
        for note in arm.notes:
            say(note)
        if arm.refused:
            if strict:
                raise UserError(f"{arm.plan} cannot be applied to {job.model}: {arm.reason}")
            say(f"{arm.plan} is not applied to {job.model}, the full features are used: {arm.reason}")


# ---------------------------------------------------------------------------------------------------------------- one pass


@dataclass
class Done:
    """What a pass over one split gave, over all processes."""

    records: dict[str, list[Record]]  # by the plan's text
    n_samples: int
    broken: list[Broken]


def _pass_over(
    split: str,
    source: Source,
    task: Task,
    arms: Sequence[Arm],
    full: Arm,
    job: Job,
    args: argparse.Namespace,
    device: torch.device,
    show: bool,
    here: World,
) -> Done:
    """Every batch under every plan, beginning with another each time; process 0 has the records of all, in order."""
    if not arms:
        return Done({}, 0, [])
    reading = Reading(source, f"{job.dataset} ({split})" if split != "test" else job.dataset, args.max_broken, here)
    title = f"{job.model} on {reading.data}" if show else None
    batches = reading.batches(args.batch_size, args.num_workers, device, title)
    mine: list[tuple[Any, list[Record]]] = []
    try:
        with torch.inference_mode():
            for turn, batch in enumerate(batches if full in arms else _timing_full(batches, full, arms, task)):
                order = [(turn + place) % len(arms) for place in range(len(arms))]  # nobody always pays for the cold cache
                encoders = [partial(arms[which], samples=batch.samples) for which in order]
                made = task.batch(split, batch.images, batch.targets, encoders)
                mine.append((batch.number, [made[order.index(which)] for which in range(len(arms))]))
    except torch.OutOfMemoryError as error:
        raise UserError(f"{device} has too little memory for --batch_size {args.batch_size}: try a smaller one.") from error
    gathered = here.gather((mine, reading.n_samples, reading.broken))
    if gathered is None:
        return Done({}, 0, [])
    n_samples, broken = sum(n for _, n, _ in gathered), [sample for *_, some in gathered for sample in some]
    judge(broken, n_samples, n_samples + len(broken), args.max_broken, reading.data)
    ordered = sorted((entry for entries, *_ in gathered for entry in entries), key=lambda entry: entry[0])
    records = {str(arm.plan): [made[place] for _, made in ordered] for place, arm in enumerate(arms)}
    return Done(records, n_samples, broken)


def _timing_full(batches: Iterator[Batch], full: Arm, arms: Sequence[Arm], task: Task) -> Iterator[Batch]:
    """The same batches; now and then, never for long, one also goes through the unreduced model, to time it."""
    for batch in batches:
        yield batch
        if full.seconds <= FULL_SHARE * sum(arm.seconds for arm in arms):
            full(_flat(task.headlined(batch.images)), samples=batch.samples)


def _flat(inputs: Inputs) -> Inputs:
    """Images (B,n,3,h,w) one after another (B n,3,h,w); others, and what is no images alone, as it is."""
    return inputs.flatten(0, -4) if isinstance(inputs, Tensor) else inputs


def _a_sample(data: dict[str, Source], device: torch.device) -> Inputs:
    """The first image (1,3,h,w), or inputs by name of the first sample, to count operations with."""
    source = next(iter(data.values()))
    found = _flat(next(batch.images for batch in source.loader(1, 0) if batch.images is not None))
    return moved(found[:1] if isinstance(found, Tensor) else found, device)


def _no_model(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """What can be said of reductions that were made in an earlier run."""
    unknown = dict.fromkeys(("applied", "tokens_in", "tokens_out", "gflops", "gflops_full"))
    speeds = dict.fromkeys(("images_per_second", "images_per_second_full"))
    reason = "the features are of an earlier run (--skip_load)"
    return [{"plan": str(plan), **unknown, "reason": reason, "layers": [], **speeds, "notes": []} for plan in plans]


def _with_what_was_measured(row: dict[str, Any], file: Path) -> dict[str, Any]:
    """Where the same run is there already and measured what this one, from kept features, did not: that is taken over."""
    if results.stored_key(file) != row["run"]["key"]:
        return row
    earlier, now = json.loads(file.read_text())["reduction"], row["reduction"]
    if now["applied"] is None:  # there was no model to measure
        return {**row, "reduction": earlier}
    return {**row, "reduction": {**earlier, **{name: value for name, value in now.items() if value is not None}}}


def _row(
    job: Job,
    task: Task,
    records: dict[str, list[Record]],
    reduction: dict[str, Any],
    run: dict[str, Any],
    args: argparse.Namespace,
    data: dict[str, Source],
) -> dict[str, Any]:
    source = next(reversed(data.values()))
    return {
        "dataset": job.dataset,
        "model": job.model,
        "pretrained": job.pretrained,
        "task": job.task,
        "metrics": task.metrics(records),
        "language": job.language,
        **({"classnames": source.classes} if args.dump_classnames else {}),
        **({"templates": source.templates} if args.dump_templates else {}),
        "reduction": reduction,
        "run": run,
    }
