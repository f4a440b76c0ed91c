"""`tokensieve tune`: checks, the two stages of the search, and what is written and printed."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tokensieve import files, provenance
from tokensieve.device import find_device
from tokensieve.errors import UserError
from tokensieve.models import loading
from tokensieve.models.loading.registry import MODEL_TYPES, ModelType, type_of_name
from tokensieve.plan import Plan
from tokensieve.registry import resolve
from tokensieve.search.study import import_optuna, translate_storage_errors
from tokensieve.terminal import progress
from tokensieve.tuning import results
from tokensieve.tuning.costs import Costs
from tokensieve.tuning.evaluator import Evaluator
from tokensieve.tuning.images import Request, describe_unreadable
from tokensieve.tuning.outline import outline
from tokensieve.tuning.space import Space, find_methods
from tokensieve.tuning.stages import Goal, Tuning, calibration_plans
from tokensieve.tuning.study import FILE, Record
from tokensieve.tuning.subject import Subject

SEARCH_SHARE, CHEAP_SHARE, EXACT_SHARE = 0.55, 0.006, 0.3  # of the time: the first stage, one of its trials, all distances
CHEAP = (8, 64)  # images of a trial
LEAST_MEASURED = 32  # images of the second stage, if there are so many
FIRST_SHARE = 0.4  # of the first stage, after which a few plans are measured to correct the predictions
ROUNDS = (3, 7)  # of timing, fewer if there is less than a minute
PLANS = 16  # plans of the second stage, for sharing the time


def run(args: argparse.Namespace) -> Path:
    """Runs or continues a search; the result file."""
    kind = model_type(args)
    goal = check_goal(args)
    import_optuna()
    methods, with_resize = find_methods(args.methods, kind.takes_questions)
    device = find_device(args.device)
    names, weights = ([name] if name is not None else None for name in (args.model, args.pretrained))
    model, pretrained = loading.model_pairs(names, weights, None, kind.name)[0]
    loading.check_model(model, pretrained, kind.name)
    folder = Path(args.output) if args.output else Path("results") / "tune" / files.slug(Path(model).name)
    files.check_writable(folder / results.RESULT)
    subject: Subject = resolve(kind.tune)(Request(model, args.images, args.questions, args.limit, args.seed))
    about = {"model": f"{kind.name} {model} {pretrained}", "images": subject.images.fingerprint}
    about |= {name: provenance.digest(value) for name, value in subject.about().items()}
    objective = {**vars(goal), "methods": methods, "resize": with_resize, "seed": args.seed, "device": str(device)}
    with files.FolderLock(folder, "tokensieve tune"), translate_storage_errors(f"the study {folder / FILE}"):
        record = Record(folder, about, objective, args.seed)
        subject.prepare(loading.load(model, pretrained, model_type=kind.name, device=device))
        record.claim("weights", subject.loaded.fingerprint)
        record.start()
        evaluator = Evaluator(subject, device, args.batch_size, args.seed)
        shape = outline(subject, evaluator.sample)
        check_keep(goal, shape.tokens)
        space = Space(shape, tuple(methods), with_resize and not shape.no_resize_reason, goal.keep)
        settings = {
            "model": {"name": model, "pretrained": pretrained, "model_type": kind.name, "weights": subject.loaded.fingerprint},
            "goal": vars(goal),
            "device": str(device),
            "seed": args.seed,
            "methods": methods,
        }
        with _results(subject, record, goal, settings, folder, args.quiet, shape.no_resize_reason) as images:
            search(args, evaluator, space, record, goal, images)
    return folder / results.RESULT


def model_type(args: argparse.Namespace) -> ModelType:
    """The type that --model_type names, or that the model's name or --questions decide."""
    named = MODEL_TYPES.get_or_fail(type_of_name(args.model, args.model_type))
    default = next(iter(MODEL_TYPES.values()))
    if args.questions is not None and not named.takes_questions:
        asking = next((kind for kind in MODEL_TYPES.values() if kind.takes_questions), None)
        if named is not default or asking is None:
            raise UserError(f"--questions: models of the type {named.name} read no text; leave it out")
        return asking
    return named


def check_goal(args: argparse.Namespace) -> Goal:
    """The goal of the flags; a UserError if it is none."""
    if args.speedup is not None and not (math.isfinite(args.speedup) and args.speedup > 1):
        raise UserError(f"--speedup {args.speedup:g}: the plan is to be faster than the model; give more than 1, such as 2")
    if args.speedup is None and args.keep is None:
        return Goal(2.0, None)
    return Goal(args.speedup, args.keep)


def check_keep(goal: Goal, tokens: int) -> None:
    """A UserError if an image has no more tokens than are to be kept."""
    if goal.keep is not None and goal.keep >= tokens:
        raise UserError(f"--keep {goal.keep}: an image has {tokens} tokens in this model; give fewer")


def check_speedup(goal: Goal, costs: Costs) -> None:
    """A UserError if no plan of the space can be expected to be so fast."""
    if goal.speedup is not None and (fastest := costs.fastest()) < goal.speedup:
        raise UserError(
            f"--speedup {goal.speedup:g} cannot be reached: the fastest plan for this model is expected at {fastest:.2f}x; "
            "give less"
        )


def search(
    args: argparse.Namespace, evaluator: Evaluator, space: Space, record: Record, goal: Goal, images: dict[str, Any]
) -> None:
    """Both stages. images: filled with how many images each uses."""
    costs = Costs(space, record.remember("coefficients", lambda: list(Costs.fit(space, evaluator.gflops).coefficients)))
    check_speedup(goal, costs)  # by operations alone, before any work
    seconds = 60 * args.budget_minutes
    each = record.remember("seconds_per_image", evaluator.seconds_per_image)
    total = len(evaluator.subject.images)
    fitting = int(EXACT_SHARE * seconds * (goal.speedup or 1.5) / (PLANS * each))
    n_images = record.remember("n_images", lambda: min(total, max(LEAST_MEASURED, fitting)))
    wanted = int(CHEAP_SHARE * seconds * (goal.speedup or 1.5) / each)
    n_cheap = record.remember("n_cheap", lambda: _whole_batches(min(n_images, max(CHEAP[0], min(CHEAP[1], wanted))), args))
    images |= {"measured": n_images, "tried": n_cheap}
    with _progress("full model", n_images, evaluator.subject.unit, args.quiet) as step:
        evaluator.compute_full(n_images, step)
    _calibrate(costs, evaluator, record, goal)
    images["timed"] = evaluator.timed_images
    check_speedup(goal, costs)
    stages = Tuning(evaluator, space, costs, record, goal, n_images, n_cheap, ROUNDS[seconds >= 60], seconds)
    stages.recalibrate()
    for part, measure in ((FIRST_SHARE, stages.measure_first), (1.0, stages.measure)):
        trials = math.ceil(part * args.trials)
        with _progress("search", trials, "plan", args.quiet, len(record.trials)) as step:
            stages.report = partial(step, 1)
            stages.search(trials, part * SEARCH_SHARE * seconds)
        with _progress("measure", stages.measured_plans(), "plan", args.quiet, len(record.rows)) as step:
            stages.report = partial(step, 1)
            measure()


def _whole_batches(n: int, args: argparse.Namespace) -> int:
    """A number of images in whole batches, where there is more than one."""
    size: int = args.batch_size
    return n if n < size else n // size * size


def _calibrate(costs: Costs, evaluator: Evaluator, record: Record, goal: Goal) -> None:
    """Corrects the predictions by a few measured times, which are kept for the next run."""

    def measure() -> dict[str, float]:
        plans = calibration_plans(costs.space, costs, goal)
        plans = {name: plan for name, plan in plans.items() if _fits(evaluator, plan)}
        if plans:
            times = evaluator.speedups(list(plans.values()), ROUNDS[0], with_oracle=False)
            costs.calibrate([(name, plans[name], row["speedup"]) for name, row in zip(plans, times, strict=True)])
        return costs.exponents

    costs.exponents = dict(record.remember("exponents", measure))


def _fits(evaluator: Evaluator, plan: Plan) -> bool:
    try:
        evaluator.handle(plan)
        return True
    except UserError:
        return False


@contextmanager
def _results(
    subject: Subject,
    record: Record,
    goal: Goal,
    settings: Mapping[str, Any],
    folder: Path,
    quiet: bool,
    no_resize_reason: str,
) -> Iterator[dict[str, Any]]:
    """Writes and prints what was found at the end, also if the search is stopped. Yields where image counts are put."""
    images: dict[str, Any] = {}
    is_stopped = False
    try:
        yield images
    except (KeyboardInterrupt, SystemExit):
        is_stopped = True
        raise
    finally:
        if is_stopped or sys.exc_info()[0] is None:
            found = _found(subject, record, goal, settings, images, no_resize_reason)
            path = results.write(found, folder)
            if not quiet:
                results.show(found, path)
            if is_stopped:
                print(f"tokensieve: stopped; the same command again goes on with the search in {folder}", file=sys.stderr)


def _found(
    subject: Subject,
    record: Record,
    goal: Goal,
    settings: Mapping[str, Any],
    images: Mapping[str, Any],
    no_resize_reason: str,
) -> results.Found:
    notes = [*subject.loaded.notes]
    if subject.images.remark:
        notes.append(subject.images.remark)
    if subject.images.unreadable:
        notes.append(describe_unreadable(subject.images.unreadable))
    if no_resize_reason:
        notes.append(f"searched without resize: {no_resize_reason}")
    n, total = images.get("measured", 0), len(subject.images)
    if 0 < n < total:
        notes.append(f"{n} of {total} {subject.unit}s were used, as many as --budget_minutes allows; give more for all")
    about = {
        **settings,
        "images": {
            "source": subject.images.source,
            "available": subject.images.available,
            "used": total,
            **images,
            "unreadable": subject.images.unreadable,
            **subject.about(),
        },
        "seconds": record.seconds,
    }
    model: Any = settings["model"]
    title = f"{model['name']} on {n} {subject.unit}s of {subject.images.source}, {settings['device']}"
    return results.Found(record.trials, record.rows, goal.speedup, subject.distance, subject.unit, about, title, notes)


@contextmanager
def _progress(title: str, total: int, unit: str, quiet: bool, done: int = 0) -> Iterator[Callable[..., None]]:
    with progress.bar(total=max(total, done), desc=title, unit=unit, quiet=quiet, leave=False, initial=done) as bar:

        def step(count: int, text: str = "") -> None:
            if text:
                bar.set_postfix_str(f"best {text}", refresh=False)
            bar.update(count)

        yield step
