"""TODO docstring."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tokensieve.cutting.selection import pruning_plan, selection_plan
from tokensieve.data import registry as data_registry
from tokensieve.errors import UserError
from tokensieve.evaluation.notices import WarnOnce
from tokensieve.methods.registry import REGISTRY
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.plan import Plan
from tokensieve.reid import loading

CLASSIFICATION, LINEAR_PROBE, VQA, REID = "zeroshot_classification", "linear_probe", "vqa", "reid"
TASKS = {  # name: its file in tasks/ and its class there
    CLASSIFICATION: ("zeroshot_classification.task", "ClassificationTask"),
    "zeroshot_retrieval": ("zeroshot_retrieval.task", "RetrievalTask"),
    LINEAR_PROBE: ("linear_probe.task", "LinearProbeTask"),
    "image_caption_selection": ("image_caption_selection.task", "CaptionSelectionTask"),
    "captioning": ("captioning.task", "CaptioningTask"),
    VQA: ("vqa.task", "VqaTask"),
    REID: ("../reid.task", "ReidTask"),
}
DEFAULT_PLAN = "anchor(k=10,m=50,alpha=0.5)"
DEFAULT_JOB = ("none", DEFAULT_PLAN, "random:60", "grid:60")
TOKEN_SELECTION_FLAGS = {
    "token_selection_k": "k",
    "token_selection_m": "m",
    "token_selection_alpha": "alpha",
}  # flag: its argument
PRUNING_FLAGS = {flag: flag for flag in ("k_anchors", "top_m", "alpha", "prune_layer")}
# Flags that a result is not known by (files are, by their content), but that are needed to make it again; their defaults.
FLAGS_TO_REPEAT: dict[str, Any] = {
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
        lambda name: name == loading.EMBEDDED or loading.is_model(name),
    ),
)


def resolve_task_and_model_type(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with what others decide filled in: questions need a model that answers, such a model needs questions."""
    made = copy.copy(args)
    meant = [kind for kind in KINDS if args.task == kind.task or args.model_type == kind.model_type]
    meant += [kind for kind in KINDS if any(map(kind.knows, args.model or []))]
    if not args.dataset and meant:
        made.dataset = [meant[0].dataset]
    tasks = {
        name: data_registry.task_of(name) if args.task == "auto" else args.task
        for name in data_registry.dataset_names(made.dataset)
    }
    for (name, task), kind in product(tasks.items(), KINDS):
        if (task == kind.task) != (data_registry.contents_of(name) == {VQA: "questions", REID: "objects"}[kind.task]):
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


def has_plan_flags(args: argparse.Namespace) -> bool:
    return args.plan is not None or bool(args.compare or args.enable_pruning or args.enable_token_selection)


def requested_plans(args: argparse.Namespace) -> list[str]:
    """The plans of a run that is not the default one: the one asked for, or none, and those to compare."""
    asked: list[tuple[str, str]] = []
    if args.plan is not None:
        asked.append(("--plan", args.plan))
    if args.enable_pruning:
        asked.append(("--enable_pruning", str(pruning_plan(**_typed_options(args, PRUNING_FLAGS)))))
    if args.enable_token_selection:
        asked.append(("--enable_token_selection", str(selection_plan(**_typed_options(args, TOKEN_SELECTION_FLAGS)))))
    if len(asked) > 1:
        flags = " and ".join(flag for flag, _ in asked)
        raise UserError(f"{flags} exclude each other; put the second plan in --compare: --compare {asked[1][1]!r}")
    return [text for _, text in asked] + ([] if asked else ["none"]) + args.compare


def check_switches(args: argparse.Namespace) -> None:
    """A setting of S1 or S2 without its switch would be passed over in silence: a UserError."""
    for flags, switch in ((TOKEN_SELECTION_FLAGS, "enable_token_selection"), (PRUNING_FLAGS, "enable_pruning")):
        given = [flag for flag in flags if getattr(args, flag) is not None]
        if given and not getattr(args, switch):
            raise UserError(f"--{given[0]} works with --{switch} only: add --{switch}.")
    if args.token_fusion_weight is not None and args.token_fusion != "weighted":
        raise UserError("--token_fusion_weight works with --token_fusion weighted only: add it.")


def _typed_options(args: argparse.Namespace, flags: dict[str, str]) -> dict[str, Any]:
    """The arguments whose flags were typed; the others keep their defaults."""
    return {name: getattr(args, flag) for flag, name in flags.items() if getattr(args, flag) is not None}


def check_weights(args: argparse.Namespace, plans: Sequence[Plan]) -> None:
    """Weights that no plan asks for would be passed over in silence: a UserError."""
    if args.weights and not any(plan.is_trained for plan in plans):
        trained = ", ".join(name for name, method in REGISTRY.items() if method.part)
        raise UserError(f"--weights {args.weights[0]}: no method of the plan is a trained one ({trained}).")


def warn_unused_flags(args: argparse.Namespace, tasks: set[str], say: WarnOnce) -> None:
    for flag, (users, default) in TASK_FLAGS.items():
        if not tasks.intersection(users) and getattr(args, flag) != default:
            say(f"--{flag} has no effect on {', '.join(sorted(tasks))}")
