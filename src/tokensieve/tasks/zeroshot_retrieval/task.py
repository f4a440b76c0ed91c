"""Zero-shot retrieval: for each caption its image among all images, and for each image one of its captions among all of them.

recall@k is the share of captions (of images) with a match among the k nearest: clip_benchmark 1.6.2's
image_retrieval_recall@k (text_retrieval_recall@k). Scores are made a block at a time and never kept, so memory grows with
the number of images and captions, not with their product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokensieve.data.source import Source
from tokensieve.errors import UserError
from tokensieve.tasks.base import Encode, Prediction, Record, SampleScores, Task, TaskContext, once_per_plan
from tokensieve.tasks.statistics import grouped_stderr
from tokensieve.tasks.text_matching import images_to_unit, one_image_each, texts_to_unit

NAME = "zeroshot_retrieval"
_SCORES = 2**24  # how many scores are held at once
MATCHES = 5  # best matches that a prediction names


class Features(NamedTuple):
    """What is kept of a batch: unit features of its images (B,E) and captions (T,E), and how many captions each image has."""

    images: Tensor
    texts: Tensor
    counts: list[int]
    captions: list[str]  # with --save_predictions


class RetrievalTask(Task):
    """Recall at every k of --recall_k, both ways."""

    name = NAME

    def __init__(self, context: TaskContext) -> None:
        self.context = context
        self.ks: list[int] = list(dict.fromkeys(context.args.recall_k))
        self.metric = f"image_retrieval_recall@{self.ks[0]}"
        self.source = context.source(context.args.split)
        if self.source.size is not None:
            _check_ks(self.ks, self.source.size, "images")

    def sources(self) -> dict[str, Source]:
        return {"test": self.source}

    def settings(self) -> dict[str, Any]:
        return {"recall_k": self.ks}

    def batch(self, split: str, images: Tensor, targets: list[list[str]], encoders: Sequence[Encode]) -> list[Record]:
        images = one_image_each(images, NAME)
        captions = list(chain.from_iterable(targets))
        texts, named = texts_to_unit(self.context, captions), captions if self.context.saves_predictions else []
        counts = [len(captions) for captions in targets]
        return [Features(images_to_unit(self.context, encode, images), texts, counts, named) for encode in encoders]

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        return recalls(self._hits(records))

    def sample_scores(self, records: dict[str, list[Record]]) -> SampleScores:
        """Of every caption: is its image among the nearest. The captions of one image belong together."""
        hits = self._hits(records)
        return SampleScores(hits.of_text[self.ks[0]].double(), hits.owner)

    def predictions(self, records: dict[str, list[Record]], samples: dict[str, Tensor]) -> list[Prediction]:
        """A line for every caption (`of` is "caption"), whose prediction is the nearest image, then one for every image."""
        found: list[Features] = records["test"]
        images, texts = (torch.cat(parts) for parts in zip(*((batch.images, batch.texts) for batch in found), strict=True))
        captions = [text for batch in found for text in batch.captions]
        owner = self._hits(records).owner
        numbers = samples["test"].tolist()
        made: list[Prediction] = []
        for text, image, (best, scores) in zip(captions, owner.tolist(), _best_matches(texts, images), strict=True):
            matches = [[numbers[other], score] for other, score in zip(best, scores, strict=True)]
            right = best[0] == image
            made.append({"of": "caption", "sample": numbers[image], "caption": text, "label": numbers[image]})
            made[-1] |= {"prediction": matches[0][0], "score": scores[0], "correct": right, "matches": matches}
        own: list[list[str]] = [[] for _ in numbers]
        for text, image in zip(captions, owner.tolist(), strict=True):
            own[image].append(text)
        for image, (best, scores) in enumerate(_best_matches(images, texts)):
            matches = [[captions[other], score] for other, score in zip(best, scores, strict=True)]
            right = int(owner[best[0]]) == image
            made.append({"of": "image", "sample": numbers[image], "label": own[image], "prediction": matches[0][0]})
            made[-1] |= {"score": scores[0], "correct": right, "matches": matches}
        return made

    @once_per_plan
    def _hits(self, records: dict[str, list[Record]]) -> Hits:
        found: list[Features] = records["test"]
        images = torch.cat([batch.images for batch in found])
        texts = torch.cat([batch.texts for batch in found])
        counts = torch.tensor([count for batch in found for count in batch.counts])
        return find_hits(images, texts, torch.arange(len(images)).repeat_interleave(counts), self.ks)


def _best_matches(ours: Tensor, theirs: Tensor) -> Iterator[tuple[list[int], list[float]]]:
    """For each of ours (n,E) the nearest of theirs (m,E), and their similarities."""
    for part in ours.split(max(1, _SCORES // len(theirs))):
        best = (part @ theirs.T).topk(min(MATCHES, len(theirs)), dim=1)
        yield from zip(best.indices.tolist(), best.values.tolist(), strict=True)


class Hits(NamedTuple):
    """By k: has the caption (T,) its image, and the image (n,) one of its captions, among the k nearest."""

    of_text: dict[int, Tensor]
    of_image: dict[int, Tensor]
    owner: Tensor  # (T,) the image each caption belongs to


def find_hits(images: Tensor, texts: Tensor, owner: Tensor, ks: Sequence[int]) -> Hits:
    """images (n,E), texts (T,E), owner (T,): the image each caption belongs to."""
    _check_ks(ks, len(images), "images")
    _check_ks(ks, len(texts), "captions")
    of_text = {k: torch.zeros(len(texts), dtype=torch.bool) for k in ks}
    block = max(1, _SCORES // len(images))
    for start in range(0, len(texts), block):
        scores = texts[start : start + block] @ images.T  # (b, n)
        for k, hits in of_text.items():  # each k by its own topk: among equal scores they may choose differently
            nearest = scores.topk(k, dim=1).indices
            hits[start : start + block] = (nearest == owner[start : start + block, None]).any(1)
    of_image = {k: torch.zeros(len(images), dtype=torch.bool) for k in ks}
    block = max(1, _SCORES // len(texts))
    for start in range(0, len(images), block):
        scores = (texts @ images[start : start + block].T).T.contiguous()  # (b, T)
        numbers = torch.arange(start, start + len(scores))
        for k, hits in of_image.items():
            nearest = scores.topk(k, dim=1).indices
            hits[start : start + block] = (owner[nearest] == numbers[:, None]).any(1)
    return Hits(of_text, of_image, owner)


def recalls(hits: Hits) -> dict[str, float]:
    """recall@k both ways with standard errors.

    The captions of one image are not independent of each other: their standard error is that of whole images.
    """
    made: dict[str, float] = {}
    for k, of_text in hits.of_text.items():
        made[f"image_retrieval_recall@{k}"] = of_text.double().mean().item()
        made[f"text_retrieval_recall@{k}"] = hits.of_image[k].double().mean().item()
    for k, of_text in hits.of_text.items():
        made[f"image_retrieval_recall@{k}_stderr"] = grouped_stderr(of_text, hits.owner)
        made[f"text_retrieval_recall@{k}_stderr"] = grouped_stderr(hits.of_image[k], torch.arange(len(hits.of_image[k])))
    return made


def _check_ks(ks: Sequence[int], count: int, what: str) -> None:
    if max(ks) > count:
        raise UserError(f"--recall_k {max(ks)}: there are only {count} {what} to find; give {count} at most.")
