"""Zero-shot classification: an image belongs to the class whose prompts its feature is nearest to.

The numbers are those of clip_benchmark 1.6.2 (acc1, acc5, mean_per_class_recall; mean_average_precision for several labels
an image), each with its standard error beside it. Several encoders (one a plan) are scored in one pass over the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from tokensieve.data.source import Source
from tokensieve.errors import UserError
from tokensieve.files import back_up
from tokensieve.tasks.base import Encode, Record, Task, TaskContext
from tokensieve.tasks.statistics import accuracies, bootstrap_stderr, mean_average_precision
from tokensieve.tasks.zeroshot_classification.classifier import load_classifiers, save_classifier, zero_shot_classifier

NAME = "zeroshot_classification"


class ClassificationTask(Task):
    """Zero-shot classification of one data set, with one label an image or several."""

    name = NAME
    metric = "acc1"  # of several labels: mean_average_precision

    def __init__(self, setup: TaskContext) -> None:
        self.setup = setup
        self.source = setup.source(setup.args.split)
        self.classifier: Tensor | None = None  # (E, C)

    def sources(self) -> dict[str, Source]:
        return {"test": self.source}

    def settings(self) -> dict[str, Any]:
        """The contents of the classifiers that are loaded."""
        files = self.setup.args.load_clfs
        return {"classifiers": [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if Path(file).is_file()]}

    def prepare(self) -> None:
        """The classifier: from --load_clfs, or from the class names; to --save_clf if asked."""
        setup, args = self.setup, self.setup.args
        classes = self.source.classes
        if args.load_clfs:
            self.classifier = load_classifiers(args.load_clfs, setup.device)
            if self.classifier.shape[1] != len(classes):
                there = self.classifier.shape[1]
                raise UserError(f"{args.load_clfs[0]} is for {there} classes, {setup.dataset} has {len(classes)}.")
        else:
            named = tqdm(classes, desc="prompts", unit="class", leave=False, disable=not setup.show)
            model, tokenizer = setup.loaded.model, setup.loaded.tokenizer
            templates = self.source.templates
            self.classifier = zero_shot_classifier(model, tokenizer, named, templates, setup.device, setup.precision)
        if setup.save_clf is not None:
            if setup.save_clf.exists():
                back_up(setup.save_clf)
            save_classifier(setup.save_clf, self.classifier)

    def batch(self, split: str, images: Tensor, targets: Tensor, encoders: Sequence[Encode]) -> list[Record]:
        assert self.classifier is not None
        made = []
        for encode in encoders:
            with self.setup.precision():
                features = F.normalize(encode(images), dim=-1)
                if features.shape[1] != self.classifier.shape[0]:
                    wide, given = features.shape[1], self.classifier.shape[0]
                    raise UserError(f"--load_clfs is for features of width {given}, {self.setup.model} has {wide}.")
                logits = 100.0 * features @ self.classifier  # (B, C)
            made.append(record(logits.float().cpu(), targets))
        return made

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, float]:
        return metrics(records["test"])


class Scored(NamedTuple):
    """What is remembered of a batch: no more than the metrics need."""

    targets: Tensor  # (B,) or (B,C)
    classes: int
    best: Tensor | None = None  # (B,) the nearest class
    hits: Tensor | None = None  # (B,k) is the j-th nearest class the right one
    logits: Tensor | None = None  # (B,C), several labels an image only


def record(logits: Tensor, targets: Tensor) -> Scored:
    """One batch: logits (B,C), targets (B,) or (B,C)."""
    classes = logits.shape[1]
    if not torch.isfinite(logits).all():
        raise UserError("the model's features hold NaN or infinity. With --amp, try without it; else check the weights.")
    if targets.dim() == 2:
        if targets.shape[1] != classes:
            raise UserError(f"{targets.shape[1]} labels an image, but {classes} class names.")
        return Scored(targets, classes, logits=logits)
    wrong = targets[(targets < 0) | (targets >= classes)]
    if len(wrong):
        raise UserError(f"a label is {int(wrong[0])}, but there are {classes} class names: 0 to {classes - 1}.")
    nearest = logits.topk(min(5, classes), dim=1).indices  # (B,k)
    return Scored(targets, classes, logits.argmax(dim=1), nearest == targets[:, None])


def metrics(records: Sequence[Scored]) -> dict[str, float]:
    """The numbers by their names."""
    targets = torch.cat([part.targets for part in records])
    if records[0].logits is not None:
        logits = torch.cat([part.logits for part in records if part.logits is not None])
        return {
            "mean_average_precision": mean_average_precision(logits, targets),
            "mean_average_precision_stderr": bootstrap_stderr(mean_average_precision, logits, targets),
        }
    best = torch.cat([part.best for part in records if part.best is not None])
    hits = torch.cat([part.hits for part in records if part.hits is not None])
    return accuracies(best, hits, targets, five=records[0].classes >= 5)
