"""The section trainer_settings of a file of two-stage VLM pruning: steps, batches, learning rates, checkpoints."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import field_validator, model_validator

from tokensieve.config.section import (
    Batch,
    Count,
    CountOrZero,
    KeepCheckpoints,
    Positive,
    Rate,
    Section,
    Seed,
    Text,
    Threads,
    Workers,
)


class LearningRate(Section):
    lr: Rate


class Optimizers(Section):
    """Three groups of weights, each with its own Adam optimizer."""

    token_merger: LearningRate = LearningRate(lr=2e-5)
    layer_pruners: LearningRate = LearningRate(lr=2e-5)
    discriminator: LearningRate = LearningRate(lr=5e-4)


class DeepLearning(Section):
    """Length, batch size and learning rates of the training."""

    epochs: Count = 1
    max_steps: Count | None = None
    """Maximum number of steps, whatever the epochs."""
    batch_size: Batch = 12
    """Questions per step of each process; multiply by processes and accumulation steps for the whole step."""
    gradient_accumulation_steps: Batch = 1
    optimizers: Optimizers = Optimizers()
    schedule: Literal["constant", "cosine"] = "constant"
    """Of the learning rates of merger and pruners, after the warm-up."""
    warmup_steps: CountOrZero = 0
    clip: Positive = 1.0
    """Maximum norm of each group's gradient."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    device: Text | None = None
    num_workers: Workers = 2
    threads: Threads | None = None
    seed: Seed = 0
    checkpoint_every: Count = 200
    keep_checkpoints: KeepCheckpoints = 2
    evaluate_every: Count | None = 200
    monitor: Literal["accuracy_hard", "loss"] = "accuracy_hard"
    """What decides which step is the best, measured on the validation questions with the hard path: the largest accuracy (of
    equal ones that with the smallest loss), or the smallest loss, the cross-entropy of the answers."""
    eval_batch_size: Batch = 16
    max_new_tokens: Batch = 10

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _accept_no(cls, value: Any) -> Any:
        """YAML reads `no` as false."""
        return "no" if value is False else value

    @model_validator(mode="after")
    def _check_warmup(self) -> DeepLearning:
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(f"warmup_steps: {self.warmup_steps} is not less than the {self.max_steps} of max_steps")
        return self

    def rate(self, step: int, steps: int) -> float:
        """The factor of the learning rates at a step."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return 0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2


class Trainer(Section):
    dl_settings: DeepLearning = DeepLearning()
