"""Image-caption selection: which caption is true of an image, and which image a caption is true of, among a few alike.

An instance has one image or several, and captions; the i-th image belongs to the i-th caption. The numbers are those of
clip_benchmark 1.6.2: text_acc (every image finds its caption), image_acc (every caption finds its image; 1 if there is
one image only), acc (both), as in Winoground (two images, two captions) and SugarCrepe (one image, two captions).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokensieve.data.source import Source
from tokensieve.errors import UserError
from tokensieve.tasks.base import Encode, Prediction, Record, SampleScores, Task, TaskContext
from tokensieve.tasks.text_matching import images_to_unit, texts_to_unit

NAME = "image_caption_selection"


class Selected(NamedTuple):
    """What is kept of a batch."""

    right: Tensor  # (B,2) did the captions find their images, and the images their captions
    captions: int  # of an image
    scores: Tensor  # (B,n,t) similarities of images and captions
    texts: list[list[str]]  # with --save_predictions


class CaptionSelectionTask(Task):
    """text_acc, image_acc and acc of one data set."""

    name = NAME
    metric = "acc"

    def __init__(self, context: TaskContext) -> None:
        self.context = context
        self.source = context.source(context.args.split)

    def sources(self) -> dict[str, Source]:
        return {"test": self.source}

    def batch(self, split: str, images: Tensor, targets: list[list[str]], encoders: Sequence[Encode]) -> list[Record]:
        instances, captions = len(targets), {len(texts) for texts in targets}
        self._check_even(captions)
        texts = texts_to_unit(self.context, list(chain.from_iterable(targets))).view(instances, *captions, -1)
        flat = images.flatten(0, 1) if images.dim() == 5 else images  # (B n,3,h,w)
        found = [images_to_unit(self.context, encode, flat).view(instances, -1, texts.shape[2]) for encode in encoders]
        named = targets if self.context.saves_predictions else []
        scores = [features @ texts.mT for features in found]  # (B,n,t)
        return [Selected(right(each), texts.shape[1], each, named) for each in scores]

    def _check_even(self, captions: set[int]) -> None:
        if len(captions) > 1 or captions == {0}:
            raise UserError(
                f"--task {NAME} needs as many captions for every image; {self.context.dataset} has {min(captions)} to "
                f"{max(captions)}. For such data there is --task zeroshot_retrieval."
            )

    def sample_scores(self, records: dict[str, list[Record]]) -> SampleScores:
        right = torch.cat([batch.right for batch in records["test"]]).all(1).double()
        return SampleScores(right, torch.arange(len(right)))

    def predictions(self, records: dict[str, list[Record]], samples: dict[str, Tensor]) -> list[Prediction]:
        """label: the captions, the i-th of the i-th image; prediction: the one that each image chooses, with its similarity."""
        found: list[Selected] = records["test"]
        made: list[Prediction] = []
        instances = [pair for batch in found for pair in zip(batch.texts, batch.scores, batch.right.tolist(), strict=True)]
        for sample, (captions, scores, (image_found, text_found)) in zip(samples["test"].tolist(), instances, strict=True):
            best = scores.max(dim=1)  # of each image
            made.append(
                {
                    "sample": sample,
                    "label": captions,
                    "prediction": [captions[choice] for choice in best.indices.tolist()],
                    "score": best.values.tolist(),
                    "correct": image_found and text_found,
                    "image_correct": image_found,
                    "text_correct": text_found,
                    "similarities": scores.tolist(),
                }
            )
        return made

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        self._check_even({batch.captions for batch in records["test"]})
        hits = torch.cat([batch.right for batch in records["test"]])  # (B,2)
        shares = {"image_acc": hits[:, 0], "text_acc": hits[:, 1], "acc": hits.all(1)}
        made = {name: hit.double().mean().item() for name, hit in shares.items()}
        return made | {f"{name}_stderr": math.sqrt(p * (1 - p) / len(hits)) for name, p in made.items()}


def right(scores: Tensor) -> Tensor:
    """Similarities of n images and t captions (B,n,t) -> (B,2): all images found by captions, all captions found."""
    truth = torch.arange(min(scores.shape[1:]))
    image_found = (scores.argmax(dim=1)[:, : len(truth)] == truth).all(1)
    text_found = (scores.argmax(dim=2)[:, : len(truth)] == truth).all(1)
    return torch.stack([image_found, text_found], dim=1)
