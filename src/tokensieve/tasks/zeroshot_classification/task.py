"""Zero-shot classification: an image belongs to the class whose prompts are nearest to its feature.

The metrics are those of clip_benchmark 1.6.2 (acc1, acc5, mean_per_class_recall; mean_average_precision for images with
several labels), each with its standard error. All plans are scored in one pass over the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.data.source import Source
from tokensieve.errors import UserError
from tokensieve.files import check_writable, output_path
from tokensieve.tasks.base import Encode, Prediction, Record, SampleScores, Task, TaskContext, check_finite
from tokensieve.tasks.labels import label_predictions, top_shares
from tokensieve.tasks.statistics import accuracies, bootstrap_stderr, mean_average_precision
from tokensieve.tasks.zeroshot_classification.classifier import load_classifiers, save_classifier, zero_shot_classifier
from tokensieve.terminal import progress

NAME = "zeroshot_classification"


class ClassificationTask(Task):
    """Zero-shot classification of one data set, with one label an image or several."""

    name = NAME
    metric = "acc1"  # of several labels: mean_average_precision

    def __init__(self, context: TaskContext) -> None:
        self.context = context
        self.source = context.source(context.args.split)
        self.classifier: Tensor | None = None  # (E, C)
        self.save_clf: Path | None = None
        if context.args.save_clf:
            self.save_clf = output_path(context.args.save_clf, "--save_clf", **context.file_fields)
            check_writable(self.save_clf, "--save_clf")

    def sources(self) -> dict[str, Source]:
        return {"test": self.source}

    def settings(self) -> dict[str, Any]:
        """The contents of the classifiers that are loaded."""
        files = self.context.args.load_clfs
        return {"classifiers": [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if Path(file).is_file()]}

    def prepare(self) -> None:
        """Make the classifier from --load_clfs or from the class names; write it to --save_clf."""
        context, args = self.context, self.context.args
        classes = self.source.classes
        if args.load_clfs:
            self.classifier = load_classifiers(args.load_clfs, context.device)
            if self.classifier.shape[1] != len(classes):
                n_classes = self.classifier.shape[1]
                raise UserError(f"{args.load_clfs[0]} is for {n_classes} classes, {context.dataset} has {len(classes)}.")
        else:
            shown = progress.bar(classes, desc="prompts", unit="class", leave=False, quiet=not context.show)
            model, tokenizer = context.loaded.model, context.loaded.tokenizer
            templates = self.source.templates
            self.classifier = zero_shot_classifier(model, tokenizer, shown, templates, context.device, context.precision)
        if self.save_clf is not None and context.is_main:
            save_classifier(self.save_clf, self.classifier)

    def batch(self, split: str, images: Tensor, targets: Tensor, encoders: Sequence[Encode]) -> list[Record]:
        assert self.classifier is not None
        made = []
        for encode in encoders:
            with self.context.precision():
                features = F.normalize(encode(images), dim=-1)
                if features.shape[1] != self.classifier.shape[0]:
                    width, expected = features.shape[1], self.classifier.shape[0]
                    raise UserError(f"--load_clfs is for features of width {expected}, {self.context.model} has {width}.")
                logits = 100.0 * features @ self.classifier  # (B, C)
            made.append(record(logits.float().cpu(), targets))
        return made

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, float]:
        return metrics(records["test"])

    def predictions(self, records: dict[str, list[Record]], samples: dict[str, Tensor]) -> list[Prediction]:
        return label_predictions(
            torch.cat([part.nearest for part in records["test"]]),
            torch.cat([part.shares for part in records["test"]]),
            torch.cat([part.targets for part in records["test"]]),
            samples["test"],
            self.source.classes,
        )

    def sample_scores(self, records: dict[str, list[Record]]) -> SampleScores | None:
        hits = [part.hits[:, 0] for part in records["test"] if part.hits is not None]
        if not hits:  # several labels an image: average precision is of a class, not of an image
            return None
        right = torch.cat(hits).double()
        return SampleScores(right, torch.arange(len(right)))


class Scored(NamedTuple):
    """What is kept of a batch: no more than the metrics need."""

    targets: Tensor  # (B,) or (B,C)
    classes: int
    nearest: Tensor  # (B,k) the nearest classes
    shares: Tensor  # (B,k) their softmax
    best: Tensor | None = None  # (B,) the nearest class
    hits: Tensor | None = None  # (B,k) is the j-th nearest class the right one
    logits: Tensor | None = None  # (B,C), several labels an image only


def record(logits: Tensor, targets: Tensor) -> Scored:
    """One batch: logits (B,C), targets (B,) or (B,C)."""
    classes = logits.shape[1]
    check_finite(logits)
    if targets.dim() == 2:
        if targets.shape[1] != classes:
            raise UserError(f"{targets.shape[1]} labels an image, but {classes} class names.")
        return Scored(targets, classes, *top_shares(logits), logits=logits)
    wrong = targets[(targets < 0) | (targets >= classes)]
    if len(wrong):
        raise UserError(f"a label is {int(wrong[0])}, but there are {classes} class names: 0 to {classes - 1}.")
    nearest, shares = top_shares(logits)
    return Scored(targets, classes, nearest, shares, logits.argmax(dim=1), nearest == targets[:, None])


def metrics(records: Sequence[Scored]) -> dict[str, float]:
    """The metrics by name."""
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
