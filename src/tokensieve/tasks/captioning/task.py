"""Captioning: a CoCa writes a sentence about each image, which is compared with those that people wrote.

The metrics are those of clip_benchmark 1.6.2 (Bleu_1 to Bleu_4, METEOR, ROUGE_L, CIDEr, SPICE). Captions are decoded with the
tokenizer that belongs to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokensieve import embedded
from tokensieve.data.source import Source
from tokensieve.errors import UserError
from tokensieve.tasks.base import Encode, Prediction, Record, SampleScores, Task, TaskContext, once_per_plan
from tokensieve.tasks.captioning import metrics as caption_metrics
from tokensieve.tasks.captioning.beam_search import CaptionTokenizer, write
from tokensieve.tasks.captioning.metrics import CaptionScores
from tokensieve.tasks.text_matching import one_image_each

NAME = "captioning"


class CaptionRecord(NamedTuple):
    """What is kept of a batch: the caption written for each image, and the captions it came with."""

    written: list[str]
    references: list[list[str]]


class CaptioningTask(Task):
    """Captions of one data set by a model that writes."""

    name = NAME
    metric = "CIDEr"

    def __init__(self, context: TaskContext) -> None:
        if not (hasattr(context.loaded.model, "generate") and hasattr(context.loaded.model, "text_decoder")):
            raise UserError(
                f"--task {NAME}: {context.model} cannot write captions, only a CoCa can. Use --model {embedded.CAPTIONER} "
                f"--pretrained {embedded.CAPTIONER_PRETRAINED}, or one of open_clip's, such as --model coca_ViT-B-32 "
                f"--pretrained mscoco_finetuned_laion2b_s13b_b90k."
            )
        caption_metrics.check_java()
        self.context = context
        self.source = context.source(context.args.split)
        self.words = CaptionTokenizer.of(context.loaded.tokenizer)
        self.run = self._write

    def sources(self) -> dict[str, Source]:
        return {"test": self.source}

    def _write(self, model: Any, images: Tensor) -> list[str]:
        with torch.inference_mode():
            return [self.words.text(ids) for ids in write(model, images, self.words)]

    def batch(self, split: str, images: Tensor, targets: list[list[str]], encoders: Sequence[Encode]) -> list[Record]:
        images, references = one_image_each(images, NAME), [list(captions) for captions in targets]
        return [CaptionRecord(encode(images), references) for encode in encoders]

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        return self._score(records).metrics

    def sample_scores(self, records: dict[str, list[Record]]) -> SampleScores:
        """CIDEr of every image. The weights of words come from the references, so they are the same under every plan."""
        values = torch.tensor(self._score(records).cider, dtype=torch.float64)
        return SampleScores(values, torch.arange(len(values)))

    def predictions(self, records: dict[str, list[Record]], samples: dict[str, Tensor]) -> list[Prediction]:
        batches: list[CaptionRecord] = records["test"]
        pairs = [pair for batch in batches for pair in zip(batch.references, batch.written, strict=True)]
        return [
            {"sample": sample, "label": references, "prediction": caption, "score": score}
            for sample, (references, caption), score in zip(
                samples["test"].tolist(), pairs, self._score(records).cider, strict=True
            )
        ]

    @once_per_plan
    def _score(self, records: dict[str, list[Record]]) -> CaptionScores:
        batches: list[CaptionRecord] = records["test"]
        written = [text for batch in batches for text in batch.written]
        references = [captions for batch in batches for captions in batch.references]
        return caption_metrics.score(written, references, self.context.warn)
