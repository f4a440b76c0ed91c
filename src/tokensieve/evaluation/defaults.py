"""The data set, model and weights of an evaluation where they are not given.

Without --dataset, --model and --pretrained they are the embedded ones. As soon as one of them is given, the others are those of
clip_benchmark, except that an embedded data set goes with its embedded model, and an embedded model with its embedded data.
Tasks on other contents than labels, and model types with tasks of their own, keep the embedded data that they declare. A data
set that declares a model goes with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tokensieve import embedded
from tokensieve.data.registry import dataset_names, get_dataset
from tokensieve.errors import UserError
from tokensieve.evaluation.flags import AUTO, BENCHMARK_DATASET, BENCHMARK_MODEL, DEFAULT_MODEL_TYPE
from tokensieve.models import loading
from tokensieve.tasks.registry import TASKS, all_tasks


def default_dataset(args: argparse.Namespace, own_types: Sequence[str]) -> list[str] | None:
    """The data set of a run without --dataset; None: the embedded one of the bare command.

    own_types: the requested model types that serve tasks of their own.
    """
    own: str | None = None
    if args.task != AUTO:
        own = TASKS[args.task].dataset
    elif own_types:
        own = next(task.dataset for task in all_tasks() if task.model_type == own_types[0])
    has_model = bool(args.model or args.pretrained or args.pretrained_model)
    if own in (None, embedded.DATASET) and has_model and not _has_embedded_model(args):
        return [BENCHMARK_DATASET]
    return None if own is None else [own]


def default_model(args: argparse.Namespace) -> list[str] | None:
    """The model of a run without --model, where any type of model will do; None: the default model of its type."""
    if args.pretrained_model or args.model_type != DEFAULT_MODEL_TYPE:
        return None
    if args.pretrained and _embedded_models(args.pretrained):
        return _embedded_models(args.pretrained)
    is_embedded = all(get_dataset(name).group == "embedded" for name in dataset_names(args.dataset))
    return None if is_embedded else [BENCHMARK_MODEL]


def model_of_data(names: Sequence[str]) -> list[str] | None:
    """The model that all of these data sets declare; None: the default model of its type."""
    declared = {get_dataset(name).model for name in names}
    if len(declared) > 1:
        wanted = ", ".join(f"{name} ({get_dataset(name).model or 'the default'})" for name in names)
        raise UserError(f"these data sets go with different models: {wanted}; give --model, or evaluate them in separate runs.")
    return [model] if (model := declared.pop()) else None


def _has_embedded_model(args: argparse.Namespace) -> bool:
    """Whether all models of the run are embedded ones."""
    if args.pretrained_model:
        pairs = loading.model_pairs(None, None, args.pretrained_model, args.model_type)
        return all(model in embedded.MODELS for model, _ in pairs)
    if args.model:
        return all(model in embedded.MODELS for model in args.model)
    return bool(_embedded_models(args.pretrained))


def _embedded_models(weights: Sequence[str]) -> list[str]:
    """The embedded models to which all of these weights belong; none if some weights are not embedded ones."""
    owners = {tag: model for model, tags in embedded.MODELS.items() for tag in tags}
    if not all(tag in owners for tag in weights):
        return []
    return list(dict.fromkeys(owners[tag] for tag in weights))
