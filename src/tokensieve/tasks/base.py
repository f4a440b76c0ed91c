"""The interface of a task: it maps every batch to a small record and, at the end, all records to metrics.

Batches are mapped in any of several processes, under every plan in turn. The metrics are computed once, from the records of
the whole data in order, so they do not depend on how many processes shared the work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tokensieve.data.source import Broken, Inputs, Source
from tokensieve.errors import Uncuttable, UserError
from tokensieve.models.loading.loaded import Loaded
from tokensieve.models.registry import open_tower

# images (B,3,h,w) -> features (B,E) under one plan, or what the task's `run` returns; timed=False leaves it out of the times
Encode = Callable[..., Any]
Made = TypeVar("Made")
Record = Any  # what is kept of one batch under one plan: CPU tensors and plain values, small
Prediction = dict[str, Any]  # JSON values by name: "sample", "label", "prediction", "score", and what else the task knows


def once_per_plan(compute: Callable[[Any, dict[str, list[Record]]], Made]) -> Callable[[Any, dict[str, list[Record]]], Made]:
    """A method of a task that maps the records of a plan to something. The last result is kept for further calls with them,
    so that `metrics` and `sample_scores` share long work.
    """
    name = f"_kept_{compute.__name__}"

    @wraps(compute)
    def method(self: Any, records: dict[str, list[Record]]) -> Made:
        kept: tuple[Any, Made] | None = self.__dict__.get(name)
        if kept is None or kept[0] is not records:
            kept = self.__dict__[name] = (records, compute(self, records))
        return kept[1]

    return method


class SampleScores(NamedTuple):
    """The main metric of each sample, the same samples under every plan. Its mean is the metric."""

    values: Tensor  # (n,), in the order of the data
    groups: Tensor  # (n,) int64 from 0, samples of one group are not independent of each other


@dataclass
class TaskContext:
    """What a task is made with."""

    model: str
    pretrained: str
    dataset: str
    language: str
    args: argparse.Namespace
    loaded: Loaded
    device: torch.device
    precision: Callable[[], AbstractContextManager[Any]]  # autocast, or nothing
    show: bool  # progress may be shown
    warn: Callable[[str], None]  # prints a message on stderr, each one once
    source: Callable[[str], Source]  # the data of a split, by the arguments
    is_main: bool = True  # whether this process writes files
    file_fields: Mapping[str, str] = field(default_factory=dict)  # what {model}, {dataset}, ... in names of files stand for
    saves_predictions: bool = False  # --save_predictions: records hold what `Task.predictions` needs


@dataclass
class StoredPass:
    """What an earlier run stored of a pass."""

    records: list[Record]
    samples: Tensor  # (n,) int64, their numbers
    broken: list[Broken]


class Task:
    """One task on one data set, ready to run. The defaults are those of a task with one split that stores nothing.

    A subclass takes a TaskContext. Its declaration (TaskSpec) names it as "module:Class".
    """

    name: str
    metric: str  # what tables and plots show
    unit: str = "image"  # what a sample is
    context: TaskContext
    run: Callable[[Any, Inputs], Any] | None = None  # (model, images): what runs under a plan; None: encoding the images
    run_for_flops: Callable[[Any, Inputs], Any] | None = None  # (model, a sample): what FLOPs are counted of; None: encoding

    def sources(self) -> dict[str, Source]:
        """The data of each pass by its name, in the order of the passes."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What the metrics depend on besides model, plan, data and the settings of all tasks. Part of the result's key.

        Flags that separate results are added to it. A task returns one of them only to store another value than the given one.
        """
        return {}

    def counts(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        """More counts for the result, besides the samples that were read."""
        return {}

    def show(self, rows: Sequence[dict[str, Any]]) -> None:
        """Print what the table of all tasks has no column for."""

    def timed_inputs(self, images: Inputs) -> Inputs:
        """The inputs of a batch that times and FLOPs are measured on."""
        return images

    def prepare(self) -> None:
        """Work before the first batch; called only if there is something to compute."""

    def batch(self, split: str, images: Inputs, targets: Any, encoders: Sequence[Encode]) -> list[Record]:
        """One record for each plan. `targets` is (B,) or (B,C) for labels and a list of B lists of strings for captions."""
        raise NotImplementedError

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        """The metrics of one plan, with standard errors as NAME_stderr, from the records of every pass in order."""
        raise NotImplementedError

    def sample_scores(self, records: dict[str, list[Record]]) -> SampleScores | None:
        """The main metric of every sample under one plan, by which plans of a run are compared. None: a sample has none."""
        return None

    def predictions(self, records: dict[str, list[Record]], samples: dict[str, Tensor]) -> list[Prediction]:
        """What the model said of every sample under one plan, for --save_predictions: one JSON object for each.

        samples: by pass, the numbers of the samples in the data set, in the order of the records. What only predictions need is
        in the records if `context.saves_predictions`. A task without this method refuses the flag.
        """
        raise NotImplementedError

    def tokens(self, sample: Inputs) -> int | None:
        """The number of tokens of a sample's image that a plan can cut; None if the model has none."""
        try:
            h, w = open_tower(self.context.loaded.model).grid
        except Uncuttable:
            return None
        return h * w

    def language_model(self) -> nn.Module | None:
        """The part of the model that reads image and text, if there is one; its FLOPs are counted separately."""
        return None

    @property
    def weights(self) -> str:
        """The fingerprint of the weights that the records are made with."""
        return self.context.loaded.fingerprint

    def stored(self, plan: str, split: str) -> StoredPass | None:
        """The records of an earlier run with the same settings, if they were stored: then the pass is skipped for the plan."""
        return None

    def store(self, plan: str, split: str, records: list[Record], samples: Tensor, broken: Sequence[Broken]) -> None:
        """Store the records of a pass, the numbers of its samples, and which images it could not read, for a later run."""


def check_finite(features: Tensor) -> Tensor:
    """The features as they are; a UserError if they hold NaN or infinity."""
    if not bool(torch.isfinite(features).all()):
        raise UserError("the model's features hold NaN or infinity. With --amp, try without it; else check the weights.")
    return features
