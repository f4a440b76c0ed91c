"""What the arguments of an evaluation mean: its tasks, its type of model and its plans, checked before anything is loaded."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Sequence
from typing import Any

from tokensieve.cutting.pruning import pruning_plan
from tokensieve.cutting.selection import selection_plan
from tokensieve.data import registry as data_registry
from tokensieve.errors import UserError
from tokensieve.evaluation.defaults import default_dataset, default_model, model_of_data
from tokensieve.evaluation.flags import AUTO, DEFAULT_MODEL_TYPE
from tokensieve.evaluation.notices import WarnOnce
from tokensieve.methods.registry import REGISTRY
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.plan import Plan
from tokensieve.registry import resolve
from tokensieve.tasks.registry import TASKS, all_tasks, task_flags

DEFAULT_PLAN = "anchor(k=10,m=50,alpha=0.5)"
DEFAULT_JOB = (
    "none",
    "cover@2:56",  # the best of resize and cover at twice the speed, chosen on validation images
    "cover:32",
    "resize(size=80)",  # a smaller image alone, at about the same speed
    DEFAULT_PLAN,
    "anchor:60(rest=merge)",
    "random:60",
    "grid:60",
)
DEFAULT_JOB_LIMIT = 2000  # images
TOKEN_SELECTION_FLAGS = {  # flag: its argument of selection_plan
    "token_selection_k": "k",
    "token_selection_m": "m",
    "token_selection_alpha": "alpha",
}
PRUNING_FLAGS = {  # flag: its argument of pruning_plan
    "k_anchors": "k_anchors",
    "top_m": "top_m",
    "alpha": "alpha",
    "prune_layer": "prune_layer",
    "prune_rest": "rest",
}
FUSION_FLAGS = ("token_fusion_weight", "token_fusion_temperature")
STREAM_CONTENTS = ("labels", "captions")  # what data can hold whose contents are known only when it is opened


# ---------------------------------------------------------------------------------------------------- task and model type


def resolve_task_and_model_type(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with data set, model and model type filled in where they are not given (defaults.py).

    A UserError where data sets, task and model type do not fit together.
    """
    resolved = copy.copy(args)
    requested = _requested_model_types(args)
    if not args.dataset:
        resolved.dataset = default_dataset(args, requested)
    tasks = tasks_of(resolved)
    for dataset, task in tasks.items():
        check_contents(dataset, data_registry.contents_of(dataset, TASKS[task].contents), task)
    needed = {TASKS[task].model_type for task in tasks.values()}
    for model_type in requested:
        if model_type not in needed:
            spec = next(task for task in all_tasks() if task.model_type == model_type)
            raise UserError(f"{spec.model_description}: give --dataset {spec.dataset}, not {', '.join(tasks)}.")
    if len(needed) > 1:
        spec = next(TASKS[task] for task in tasks.values() if TASKS[task].model_type is not None)
        raise UserError(
            f"data sets with {spec.contents} need --model_type {spec.model_type}; "
            "evaluate the other data sets in a separate run."
        )
    needed_type = next(iter(needed), None)
    if needed_type is None:
        if not args.model and (args.dataset or args.pretrained):
            resolved.model = default_model(resolved)
        return resolved
    task = next(iter(tasks.values()))
    if args.model_type not in (DEFAULT_MODEL_TYPE, needed_type):
        raise UserError(f"--model_type {args.model_type}: the task {task} needs {needed_type}; leave --model_type out.")
    if args.token_fusion != "cls":
        raise UserError(f"--token_fusion {args.token_fusion} makes image features, and the task {task} has none; leave it out.")
    resolved.model_type = needed_type
    if not args.model and not args.pretrained_model:
        resolved.model = model_of_data(list(tasks))
    return resolved


def _requested_model_types(args: argparse.Namespace) -> list[str]:
    """The model types that serve tasks of their own and that --model_type or the name of a model asks for."""
    own = dict.fromkeys(task.model_type for task in all_tasks() if task.model_type not in (None, DEFAULT_MODEL_TYPE))
    requested = [name for name in own if name == args.model_type]
    for name in filter(None, own):
        is_model_name = MODEL_TYPES.get_or_fail(name).is_model_name
        if is_model_name and args.model and any(map(resolve(is_model_name), args.model)):
            requested.append(name)
    return [name for name in requested if name is not None]


def tasks_of(args: argparse.Namespace) -> dict[str, str]:
    """The task of every data set of a run."""
    names = data_registry.dataset_names(args.dataset)
    tasks = {name: data_registry.task_of(name) if args.task == AUTO else args.task for name in names}
    for task in tasks.values():
        TASKS.get_or_fail(task)
    return tasks


def check_contents(dataset: str, contents: str | None, task: str) -> None:
    """A UserError if the data holds something else than the task needs. contents: None if only opening it shows them."""
    needed = TASKS[task].contents
    if contents == needed or (contents is None and needed in STREAM_CONTENTS):
        return
    if needed == "images" and contents in data_registry.OF_IMAGES:  # labels and captions are left aside
        return
    held = (contents,) if contents is not None else STREAM_CONTENTS
    others = " or ".join(spec.name for spec in all_tasks() if spec.contents in held)
    raise UserError(
        f"{dataset} has {' or '.join(held)}, but the task {task} needs {needed}: give "
        f"{f'--task {others}, or ' if others else ''}another --dataset, for example {TASKS[task].dataset}."
    )


# ------------------------------------------------------------------------------------------------------------------ plans


def has_plan_flags(args: argparse.Namespace) -> bool:
    return args.plan is not None or bool(args.compare or args.enable_pruning or args.enable_token_selection)


def has_default_plans(tasks: Iterable[str], args: argparse.Namespace) -> bool:
    """Whether no plan is given and every task chooses its own for each model."""
    return not has_plan_flags(args) and all(TASKS[task].default_plans for task in tasks)


def requested_plans(args: argparse.Namespace) -> list[str]:
    """The plans of a run that is not the default one: the requested one, or none, and those to compare."""
    requested: list[tuple[str, str]] = []
    if args.plan is not None:
        requested.append(("--plan", args.plan))
    if args.enable_pruning:
        requested.append(("--enable_pruning", str(pruning_plan(**_typed_options(args, PRUNING_FLAGS)))))
    if args.enable_token_selection:
        requested.append(("--enable_token_selection", str(selection_plan(**_typed_options(args, TOKEN_SELECTION_FLAGS)))))
    if len(requested) > 1:
        flags = " and ".join(flag for flag, _ in requested)
        raise UserError(f"{flags} exclude each other; put the second plan in --compare: --compare {requested[1][1]!r}")
    return [text for _, text in requested] + ([] if requested else ["none"]) + args.compare


def _typed_options(args: argparse.Namespace, flags: dict[str, str]) -> dict[str, Any]:
    """The arguments whose flags were typed; the others keep their defaults."""
    return {name: getattr(args, flag) for flag, name in flags.items() if getattr(args, flag) is not None}


# ------------------------------------------------------------------------------------------------------- flags without effect


def warn_missing_switches(args: argparse.Namespace, warn: WarnOnce) -> None:
    """Name the settings that have no effect because their switch is missing. Scripts may toggle the switch alone."""
    for flags, switch, is_on in (
        (TOKEN_SELECTION_FLAGS, "--enable_token_selection", args.enable_token_selection),
        (PRUNING_FLAGS, "--enable_pruning", args.enable_pruning),
        (FUSION_FLAGS, "--token_fusion weighted", args.token_fusion == "weighted"),
    ):
        typed = [f"--{flag}" for flag in flags if getattr(args, flag) is not None]
        if typed and not is_on:
            warn(f"{', '.join(typed)}: no effect without {switch}")


def check_weights(args: argparse.Namespace, plans: Sequence[Plan]) -> None:
    """A UserError for --weights if no plan uses trained weights."""
    if args.weights and not any(plan.is_trained for plan in plans):
        trained = ", ".join(name for name, method in REGISTRY.items() if method.part)
        raise UserError(f"--weights {args.weights[0]}: no method of the plan is a trained one ({trained}).")


def warn_unused_task_flags(args: argparse.Namespace, tasks: set[str], warn: WarnOnce) -> None:
    """Name the flags of other tasks than these that differ from their defaults."""
    for flag, users in task_flags().values():
        if not tasks.intersection(task.name for task in users) and getattr(args, flag.dest) != flag.default:
            warn(f"--{flag.name} has no effect on {', '.join(sorted(tasks))}")


def warn_unused_flags(args: argparse.Namespace, tasks: set[str], warn: WarnOnce) -> None:
    """Name the flags that differ from their defaults and that none of these tasks uses."""
    warn_unused_task_flags(args, tasks, warn)
    contents = {TASKS[task].contents for task in tasks}
    for name, read_by in (("images", {"questions"}), ("classnames", {"labels", "images"})):
        if getattr(args, name) and not contents & read_by:
            warn(f"--{name} has no effect on {', '.join(sorted(tasks))}")
