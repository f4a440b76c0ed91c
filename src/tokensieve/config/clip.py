"""The file of the training `clip`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tokensieve.config.schema import Optimizer, Phase, Training
from tokensieve.config.section import Count, FilePath, KeepCheckpoints, Seed, Text, Threads, Workers


class ClipTraining(Training):
    """For example configs/embedded_clip.yaml."""

    task: Literal["clip"]
    output: FilePath
    model: Text = "sieve-vit-8"
    seed: Seed = 0
    optimizer: Optimizer = Optimizer()
    phases: Annotated[tuple[Phase, ...], Field(min_length=1, max_length=1000)]
    workers: Workers = 1
    threads: Threads | None = None
    checkpoint_every: Count = 100
    keep_checkpoints: KeepCheckpoints = 2
    evaluate: bool = True
    """At the end, measure on the val and test splits and write the numbers to card.json."""

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @model_validator(mode="after")
    def _check_warmup(self) -> ClipTraining:
        self.optimizer.check_warmup(self.steps)
        return self
