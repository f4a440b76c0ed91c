"""The file of the training `captions`."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from tokensieve.config.schema import Optimizer, Training
from tokensieve.config.section import Count, FilePath, KeepCheckpoints, PairBatch, Seed, Text, Threads, Weight


class CaptionTraining(Training):
    """For example configs/embedded_coca.yaml."""

    task: Literal["captions"]
    output: FilePath
    model: Text = "sieve-coca-8"
    start: Text = "scenes-v1"
    """The embedded weights that initialise both towers."""
    seed: Seed = 0
    optimizer: Optimizer = Optimizer()
    pictures: Count = 12_800
    """How many training pictures there are; each keeps about 50 kB of memory."""
    batch: PairBatch = 32
    steps: Count
    contrast: Weight = 0.5
    """Weight of the contrastive loss between captions and pictures; that of the caption loss is 1."""
    threads: Threads | None = None
    checkpoint_every: Count = 200
    keep_checkpoints: KeepCheckpoints = 2
    evaluate: bool = True
    """At the end, measure on the val and test splits and write the numbers to card.json."""

    @model_validator(mode="after")
    def _check_numbers(self) -> CaptionTraining:
        self.optimizer.check_warmup(self.steps)
        if self.batch > self.pictures:
            raise ValueError(f"batch: {self.batch} is more than the {self.pictures} pictures")
        return self
