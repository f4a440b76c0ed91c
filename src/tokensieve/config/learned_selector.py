"""The file of the training `learned_selector`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tokensieve.config.schema import Optimizer, Training
from tokensieve.config.section import Count, Fraction, KeepCheckpoints


class SelectorOptimizer(Optimizer):
    """AdamW alone, with defaults for a short run."""

    lr: Annotated[float, Field(gt=0)] = 3e-3
    floor: Fraction = 0.02
    warmup: Annotated[int, Field(ge=0)] = 10


class SelectorTraining(Training):
    """For example configs/learned_selector.yaml."""

    task: Literal["learned_selector"]
    output: Path
    model: str = "sieve-vit-8"
    pretrained: str = "scenes-v1"
    model_type: Literal["open_clip", "hf", "timm"] = "open_clip"
    model_cache_dir: str | None = None
    dataset: str = "embedded"
    dataset_root: str = "root"
    split: str = "train"
    val_split: str = "val"
    val_images: Count | None = None
    """How many images of the validation split to measure on; None: all."""
    plans: Annotated[tuple[str, ...], Field(min_length=1)]
    """Plans to train for, such as learned@4:32(rest=merge); every step draws one of them."""
    steps: Count
    batch: Annotated[int, Field(ge=2)] = 64
    feature: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the distance to the full model's image feature."""
    logits: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the divergence from the full model's class probabilities, where the data has classes."""
    attention: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the divergence of the scores from the attention in the full model's next block."""
    exploration: Annotated[float, Field(ge=0)] = 0.2
    """Gumbel noise on the ranking, so that other tokens are tried too."""
    optimizer: SelectorOptimizer = SelectorOptimizer()
    seed: Annotated[int, Field(ge=0)] = 0
    workers: Annotated[int, Field(ge=0)] = 1
    threads: Count | None = None
    device: str | None = None
    checkpoint_every: Count = 50
    keep_checkpoints: KeepCheckpoints = 2
    evaluate: bool = True
    """At the end, measure every plan and the full model on the validation split and write the numbers to card.json."""

    @model_validator(mode="after")
    def _check_plans(self) -> SelectorTraining:
        from tokensieve.plan import Plan

        self.optimizer.check_warmup(self.steps)
        for text in self.plans:
            steps = Plan.parse(text).steps
            if not any(step.method.name == "learned" for step in steps):
                raise ValueError(f"plans: {text} has nothing to train; for example learned@4:32(rest=merge)")
            if any(step.rest == "zero" for step in steps):
                raise ValueError(f"plans: {text}: the last norm undoes what rest=zero would learn; use merge, fuse or drop")
        if self.feature == self.logits == self.attention == 0:
            raise ValueError("feature, logits and attention are all 0, so there is nothing to learn from; set one to 1")
        return self
