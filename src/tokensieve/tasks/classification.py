"""Zero-shot classification: an image belongs to the class whose prompts its feature is nearest to.

The numbers are those of clip_benchmark 1.6.2 (acc1, acc5, mean_per_class_recall; mean_average_precision for several labels
an image), each with its standard error beside it. Several encoders (one a plan) are scored in one pass over the data.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from tokensieve.data.sources import Source
from tokensieve.errors import UserError
from tokensieve.models.features import encode_text
from tokensieve.results import move_aside, write_bytes
from tokensieve.tasks import Encode, Record, Setup, Task

NAME = "zeroshot_classification"


def zero_shot_classifier(
    model: Any,
    tokenizer: Callable[[list[str]], Any],
    classes: Iterable[str],
    templates: Sequence[str] | Mapping[str, Sequence[str]],
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """One unit vector a class: the mean of its prompts' unit features.  (E, C)"""
    columns = []
    with torch.inference_mode(), precision():
        for name in classes:
            tokens = tokenizer(prompts(name, templates)).to(device)
            features = F.normalize(encode_text(model, tokens), dim=-1)  # (T, E)
            mean = features.mean(dim=0)
            columns.append(mean / mean.norm())
        return torch.stack(columns, dim=1)


def prompts(name: str, templates: Sequence[str] | Mapping[str, Sequence[str]]) -> list[str]:
    """The sentences for one class: its own (a mapping from class names), or every template with {c} filled in."""
    if isinstance(templates, Mapping):
        if name not in templates:
            raise UserError(f"the template file has no prompts for the class {name!r}.")
        return list(templates[name])
    try:
        return [template.format(c=name) for template in templates]
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"a prompt template may only hold {{c}} (the class name): {error!r}.") from error


def load_classifiers(paths: Sequence[str], device: torch.device) -> Tensor:
    """The mean of saved classifiers.  (E, C)"""
    loaded: list[Tensor] = []
    for path in paths:
        try:
            classifier = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise UserError(f"cannot read the classifier {path}: {error.strerror}. Make one with --save_clf.") from error
        except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError) as error:  # not a pickle
            raise UserError(f"{path} is not a classifier saved with --save_clf.") from error
        if not isinstance(classifier, Tensor) or classifier.dim() != 2 or not torch.isfinite(classifier).all():
            raise UserError(f"{path} is not a classifier: a matrix (width, classes) of finite numbers was expected.")
        if loaded and classifier.shape != loaded[0].shape:
            raise UserError(f"{path} is {tuple(classifier.shape)}, {paths[0]} is {tuple(loaded[0].shape)}: no mean of them.")
        loaded.append(classifier)
    mean = loaded[0] / len(loaded)
    for classifier in loaded[1:]:
        mean = mean + classifier / len(loaded)
    return mean.to(device)


def save_classifier(path: Path, classifier: Tensor) -> None:
    """Write a classifier so that --load_clfs, ours or clip_benchmark's, reads it."""
    buffer = io.BytesIO()
    torch.save(classifier, buffer)
    write_bytes(path, buffer.getvalue())


class ClassificationTask(Task):
    """Zero-shot classification of one data set, with one label an image or several."""

    name = NAME
    metric = "acc1"  # of several labels: mean_average_precision

    def __init__(self, setup: Setup) -> None:
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
                move_aside(setup.save_clf)
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


def accuracies(best: Tensor, hits: Tensor, targets: Tensor, five: bool) -> dict[str, float]:
    """acc1, acc5 (where five: it says something), mean_per_class_recall and their standard errors.

    best (N,): the nearest class; hits (N,k): is the j-th nearest the right one; targets (N,).
    """
    acc1 = hits[:, :1].sum().item() / len(targets)
    acc5 = hits[:, :5].sum().item() / len(targets) if five else math.nan
    recall, recall_stderr = mean_per_class_recall(best, targets)
    return {
        "acc1": acc1,
        "acc5": acc5,
        "mean_per_class_recall": recall,
        "acc1_stderr": share_stderr(acc1, len(targets)),
        "acc5_stderr": share_stderr(acc5, len(targets)),
        "mean_per_class_recall_stderr": recall_stderr,
    }


def share_stderr(share: float, n: int) -> float:
    """Standard error of a share of n independent samples: sqrt(p (1-p) / n)."""
    return math.sqrt(share * (1 - share) / n)


def mean_per_class_recall(best: Tensor, targets: Tensor) -> tuple[float, float]:
    """Mean of the recall over the classes that occur, and its standard error (classes independent, binomial in each)."""
    size = max(int(best.max()), int(targets.max())) + 1
    total = torch.bincount(targets, minlength=size).double()  # (C,)
    right = torch.bincount(targets[best == targets], minlength=size).double()  # (C,)
    seen = total > 0
    recall = right[seen] / total[seen]
    variance = recall * (1 - recall) / total[seen]
    return recall.mean().item(), (variance.sum().sqrt() / seen.sum()).item()


def mean_average_precision(logits: Tensor, targets: Tensor) -> float:
    """Mean over the classes of the average precision (a class without a positive counts as 0, as in clip_benchmark)."""
    order = logits.argsort(dim=0, descending=True)  # (N,C)
    truth = targets.gather(0, order).float()
    rank = torch.arange(1, len(logits) + 1, dtype=torch.float32)[:, None]
    precision = truth.cumsum(dim=0) / rank
    positives = truth.bool()
    summed = torch.where(positives, precision, 0.0).sum(dim=0)  # (C,)
    return (summed / truth.sum(dim=0).clamp(min=1)).mean().item()


def bootstrap_stderr(metric: Callable[[Tensor, Tensor], float], logits: Tensor, targets: Tensor, draws: int = 100) -> float:
    """Standard deviation of the metric over sets of images drawn with replacement (fixed seed, 100 draws)."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(draws):
        sample = torch.randint(len(logits), (len(logits),), generator=generator)
        values.append(metric(logits[sample], targets[sample]))
    return float(torch.tensor(values, dtype=torch.float64).std())
