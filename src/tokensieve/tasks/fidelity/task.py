"""Fidelity: the features of the full model are the reference, so images need no labels.

    cosine       of an image's feature under the plan and that of the full model; their mean, 1 for the full model
    distance     1 - cosine, which `tune` makes small
    agreement    share of the images whose nearest class is the full model's, if there are class names (--classnames, or the
                 data's own) and the model reads texts

The full model runs once more on each batch, outside the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokensieve.data.own.classes import DEFAULT_TEMPLATES
from tokensieve.data.source import Source
from tokensieve.errors import UserError
from tokensieve.models.features import encode_image
from tokensieve.tasks.base import Encode, Prediction, Record, SampleScores, Task, TaskContext, check_finite
from tokensieve.tasks.fidelity.measures import cosine_distance, mean_and_stderr
from tokensieve.tasks.text_matching import one_image_each
from tokensieve.tasks.zeroshot_classification.classifier import zero_shot_classifier

NAME = "fidelity"


class Compared(NamedTuple):
    """What is kept of a batch: of every image (B,) the distance to the full model, and its nearest class in both."""

    distance: Tensor
    full: Tensor | None  # class of the full model
    reduced: Tensor | None  # class under the plan


class FidelityTask(Task):
    """The features of one data set under every plan, compared with those of the full model."""

    name = NAME
    metric = "cosine"

    def __init__(self, context: TaskContext) -> None:
        self.context = context
        self.source = context.source(context.args.split)
        self.classifier: Tensor | None = None  # (E, C)

    def sources(self) -> dict[str, Source]:
        return {"test": self.source}

    def settings(self) -> dict[str, Any]:
        return {"classes": self.source.classes}

    def prepare(self) -> None:
        """Make the classifier of the class names, if there are any."""
        context, source = self.context, self.source
        if not source.classes:
            return
        try:
            loaded, templates = context.loaded, source.templates or DEFAULT_TEMPLATES
            self.classifier = zero_shot_classifier(
                loaded.model, loaded.tokenizer, source.classes, templates, context.device, context.precision
            )
        except UserError:
            if context.args.classnames:
                raise
            context.warn(f"{context.model} cannot read the class names, so there is no agreement, only the cosine")

    def batch(self, split: str, images: Tensor, targets: Any, encoders: Sequence[Encode]) -> list[Record]:
        images = one_image_each(images, NAME)
        with self.context.precision():
            full = check_finite(encode_image(self.context.loaded.model, images)).double()
        return [self._compare(full, encode(images)) for encode in encoders]

    def _compare(self, full: Tensor, reduced: Tensor) -> Compared:
        distance = cosine_distance(full, check_finite(reduced)).cpu()
        if self.classifier is None:
            return Compared(distance, None, None)
        weight = self.classifier.double()
        return Compared(distance, *((features.double() @ weight).argmax(-1).cpu() for features in (full, reduced)))

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        distance, classes = _join(records["test"])
        mean, error = mean_and_stderr(distance)
        made = {"cosine": 1 - mean, "cosine_stderr": error, "distance": mean, "distance_stderr": error}
        if classes is not None:
            made["agreement"], made["agreement_stderr"] = mean_and_stderr(classes[0] == classes[1])
        return made

    def sample_scores(self, records: dict[str, list[Record]]) -> SampleScores:
        distance, _ = _join(records["test"])
        return SampleScores(1 - distance, torch.arange(len(distance)))

    def predictions(self, records: dict[str, list[Record]], samples: dict[str, Tensor]) -> list[Prediction]:
        """label: the nearest class of the full model; score: the cosine."""
        distance, classes = _join(records["test"])
        made: list[Prediction] = [
            {"sample": number, "score": 1 - far}
            for number, far in zip(samples["test"].tolist(), distance.tolist(), strict=True)
        ]
        if classes is not None:
            names = self.source.classes
            for line, full, reduced in zip(made, *(part.tolist() for part in classes), strict=True):
                line |= {"label": names[full], "prediction": names[reduced], "correct": full == reduced}
        return made

    def show(self, rows: Sequence[dict[str, Any]]) -> None:
        """How often the nearest class is the full model's."""
        for row in rows:
            if "agreement" in row["metrics"]:
                share, error = row["metrics"]["agreement"], row["metrics"]["agreement_stderr"]
                print(f"{row['reduction']['plan']}: nearest class as that of the full model {share:.4f} ± {error:.4f}")


def _join(records: Sequence[Compared]) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The distances (n,), and the classes of the full model and under the plan (n,), if there are class names."""
    full = [part.full for part in records if part.full is not None]
    reduced = [part.reduced for part in records if part.reduced is not None]
    distance = torch.cat([part.distance for part in records])
    return distance, (torch.cat(full), torch.cat(reduced)) if full else None
