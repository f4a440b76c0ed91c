"""Tasks: what is asked of the features. A task maps every batch to a small record and, at the end, records to numbers.

The map runs wherever the batch is (in any of several processes, under every plan in turn); the end runs once, on the records of
the whole data in order. So the numbers do not depend on how many processes shared the work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokensieve.data.source import Broken, Inputs, Source
from tokensieve.errors import Uncuttable
from tokensieve.models.loading.loaded import Loaded
from tokensieve.models.registry import open_tower

# images (B,3,h,w) -> features (B,E) under one plan, or what the task's `act` makes of them; with aside=True it is not timed
Encode = Callable[..., Any]
Record = Any  # what is kept of one batch under one plan: CPU tensors and plain values, small


@dataclass
class TaskContext:
    """What a task prepares itself with."""

    model: str
    pretrained: str
    dataset: str
    language: str
    args: argparse.Namespace
    loaded: Loaded
    device: torch.device
    precision: Callable[[], AbstractContextManager[Any]]  # autocast, or nothing
    show: bool  # progress may be shown
    say: Callable[[str], None]  # a remark on stderr, each one once
    source: Callable[[str], Source]  # the data of a split, by the arguments
    save_clf: Path | None = None  # where the classifier is to be kept


@dataclass
class StoredPass:
    """What an earlier run kept of a pass."""

    records: list[Record]
    n_samples: int
    broken: list[Broken]


class Task:
    """One task on one data set, ready to be run; the defaults are those of a task with one split and nothing stored."""

    name: str
    metric: str  # the number that tables and plots show
    unit: str = "image"  # what a sample is
    setup: TaskContext
    act: Callable[[Any, Inputs], Any] | None = None  # (model, images): what is run instead of encoding the images
    once: Callable[[Any, Inputs], Any] | None = None  # (model, a sample): what operations are counted of, if not encoding

    def sources(self) -> dict[str, Source]:
        """What is read, in this order, by a name for each pass."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What its numbers depend on besides model, plan, data and the settings all tasks share."""
        return {}

    def counts(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        """What a result tells besides of the samples that were read."""
        return {}

    def show(self, rows: Sequence[dict[str, Any]]) -> None:
        """Print what the table of all tasks has no column for."""

    def timed_inputs(self, images: Inputs) -> Inputs:
        """What of a batch the plan's time and its operations are told of."""
        return images

    def prepare(self) -> None:
        """What takes time before the first batch; called once it is known that there is something to do."""

    def batch(self, split: str, images: Inputs, targets: Any, encoders: Sequence[Encode]) -> list[Record]:
        """One record a plan; `targets` is (B,) or (B,C) for labels and a list of B lists of strings for captions."""
        raise NotImplementedError

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        """The numbers of one plan, and their standard errors as NAME_stderr, from the records of every pass in order."""
        raise NotImplementedError

    def tokens(self, sample: Inputs) -> int | None:
        """How many tokens a plan could cut of a sample's image; None if the model has none that can be cut."""
        try:
            h, w = open_tower(self.setup.loaded.model).grid
        except Uncuttable:
            return None
        return h * w

    def language_model(self) -> nn.Module | None:
        """The part of the model that reads image and text, if there is one: its operations are told apart."""
        return None

    @property
    def weights(self) -> str:
        """The fingerprint of the weights that the records are made with."""
        return self.setup.loaded.fingerprint

    def stored(self, plan: str, split: str) -> StoredPass | None:
        """The records of an earlier run that was the same, if they were kept: then that pass is left out for the plan."""
        return None

    def store(self, plan: str, split: str, records: list[Record], broken: Sequence[Broken]) -> None:
        """Keep the records of a pass, and which images it could not read, for a later run."""
