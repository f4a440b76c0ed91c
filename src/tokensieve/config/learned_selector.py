"""The file of the training `learned_selector`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tokensieve.config.schema import Optimizer, Training
from tokensieve.config.section import (
    Count,
    CountOrZero,
    FilePath,
    Fraction,
    KeepCheckpoints,
    PairBatch,
    Problems,
    Rate,
    Seed,
    Text,
    Threads,
    Weight,
    Workers,
)
from tokensieve.errors import UserError, one_line

METHODS = ("learned", "dynamicvit", "patchmerger", "sit", "sinkhorn")  # what can be trained


class SelectorOptimizer(Optimizer):
    """AdamW alone, with defaults for a short run."""

    lr: Rate = 3e-3
    floor: Fraction = 0.02
    warmup: CountOrZero = 10


class SelectorTraining(Training):
    """For example configs/learned_selector.yaml."""

    task: Literal["learned_selector"]
    output: FilePath
    model: Text = "sieve-vit-8"
    pretrained: Text = "scenes-v1"
    model_type: Literal["open_clip", "hf", "timm"] = "open_clip"
    model_cache_dir: Text | None = None
    dataset: Text = "embedded"
    dataset_root: Text = "root"
    split: Text = "train"
    val_split: Text = "val"
    val_images: Count | None = None
    """How many images of the validation split to measure on; None: all."""
    plans: Annotated[tuple[Text, ...], Field(min_length=1, max_length=100)]
    """Plans of one trained method, such as learned@4:32(rest=merge) or sit@4:32; every step draws one of them."""
    steps: Count
    batch: PairBatch = 64
    feature: Weight = 1.0
    """Weight of the distance to the full model's image feature."""
    logits: Weight = 1.0
    """Weight of the divergence from the full model's class probabilities, where the data has classes."""
    attention: Weight = 1.0
    """Weight of the divergence of the scores from the attention in the full model's next block; of `learned` alone."""
    exploration: Weight = 0.2
    """Gumbel noise on the ranking, so that other tokens are tried too."""
    optimizer: SelectorOptimizer = SelectorOptimizer()
    seed: Seed = 0
    workers: Workers = 1
    threads: Threads | None = None
    device: Text | None = None
    max_broken: Fraction = 0.01
    """The largest allowed share of unreadable images, rounded up."""
    checkpoint_every: Count = 50
    keep_checkpoints: KeepCheckpoints = 2
    evaluate: bool = True
    """At the end, measure every plan and the full model on the validation split and write the numbers to card.json."""

    def allowed(self, images: int) -> int:
        """How many images may be unreadable, of this many."""
        return math.ceil(self.max_broken * images)

    @property
    def method(self) -> str:
        """The method that is trained."""
        from tokensieve.plan import Plan

        return next(step.method.name for step in Plan.parse(self.plans[0]).steps if step.method.name in METHODS)

    @model_validator(mode="after")
    def _check_plans(self) -> SelectorTraining:
        from tokensieve.plan import Plan

        self.optimizer.check_warmup(self.steps)
        problems, trained = [], set[str]()
        for number, text in enumerate(self.plans):
            try:
                steps = Plan.parse(text).steps
            except UserError as error:
                problems.append(f"plans.{number}: {one_line(error)}")
                continue
            here = {step.method.name for step in steps} & set(METHODS)
            trained |= here
            if not here:
                names = ", ".join(METHODS)
                problems.append(
                    f"plans.{number}: {text} has nothing to train; for example learned@4:32(rest=merge); methods are {names}"
                )
            elif any(step.rest == "zero" for step in steps):
                problems.append(
                    f"plans.{number}: {text}: the last norm undoes what rest=zero would learn; use merge, fuse or drop"
                )
        if len(trained) > 1:
            problems.append(f"plans: {' and '.join(sorted(trained))} are trained in runs of their own; name one of them")
        if problems:
            raise Problems(problems)
        if self.feature == self.logits == self.attention == 0:
            raise ValueError("feature, logits and attention are all 0, so there is nothing to learn from; set one to 1")
        return self
