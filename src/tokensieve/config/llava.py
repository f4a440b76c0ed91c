"""The file of the training `llava`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tokensieve.config.schema import Optimizer, Training
from tokensieve.config.section import Batch, Count, Depth, FilePath, KeepCheckpoints, Rate, Section, Seed, Text, Threads, Weight

QuestionKind = Literal["colour", "shape", "count", "position", "presence", "place"]
QuestionKinds = Annotated[tuple[QuestionKind, ...], Field(min_length=1, max_length=100)]


class LlavaPhase(Section):
    """A phase of training in which every picture has a number of questions."""

    steps: Count
    batch: Batch = 16
    """Pictures in a step."""
    questions: Annotated[int, Field(ge=0, le=1000)] = 8
    """Questions about each picture; with 0 only the patch losses are trained, which needs no language model."""
    kinds: QuestionKinds = ("colour", "shape", "count", "position", "presence")
    """The kinds of questions, in turn; one that is listed twice comes twice as often."""
    layers: Depth | None = None
    """How many layers of the language model run, evenly spread; the others are skipped. None: all."""
    patches: Weight = 1.0
    """Weight of predicting what lies in each patch; that of the answers is 1."""
    places: Weight = 1.0
    """Weight of predicting where in the picture each patch lies."""
    lr: tuple[Rate, Rate] | None = None
    """Learning rate at the first and at the last step, linear between; None: the optimizer's."""

    @model_validator(mode="after")
    def _check_kinds(self) -> LlavaPhase:
        if set(self.kinds) == {"position"}:
            raise ValueError("kinds: a picture of one object has no positions; add another kind")
        return self


class LlavaTraining(Training):
    """For example configs/embedded_llava.yaml."""

    task: Literal["llava"]
    output: FilePath
    start: Text = "scenes-v1"
    """The embedded weights that initialise the vision tower."""
    layers: Depth = 12
    """Layers of the language model."""
    seed: Seed = 0
    optimizer: Optimizer = Optimizer()
    horizon: Count | None = None
    """Length of the optimizer's learning rate schedule in steps; None: all steps."""
    phases: Annotated[tuple[LlavaPhase, ...], Field(min_length=1, max_length=1000)]
    threads: Threads | None = None
    checkpoint_every: Count = 50
    keep_checkpoints: KeepCheckpoints = 2
    evaluate: bool = True
    """At the end, measure on the val and test splits and write the numbers to card.json."""

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @model_validator(mode="after")
    def _check_numbers(self) -> LlavaTraining:
        self.optimizer.check_warmup(self.steps)
        if any(phase.layers is not None and phase.layers > self.layers for phase in self.phases):
            raise ValueError(f"phases: there are no more than the {self.layers} layers")
        return self
