"""TODO docstring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tokensieve.config.schema import Optimizer, Training
from tokensieve.config.section import Count, Section

QuestionKind = Literal["colour", "shape", "count", "position", "presence", "place"]


class LlavaPhase(Section):
    """A stretch of training in which every picture has so many questions."""

    steps: Count
    batch: Count = 16
    """Pictures in a step."""
    questions: Annotated[int, Field(ge=0)] = 8
    """Questions about each picture; with 0 only the patches are named, which needs no language model."""
    kinds: Annotated[tuple[QuestionKind, ...], Field(min_length=1)] = ("colour", "shape", "count", "position", "presence")
    """The kinds of questions, which take turns; one that stands here twice comes twice as often."""
    layers: Count | None = None
    """How many of the language model's layers run, evenly spread; the others wait and pass everything on. None: all."""
    patches: Annotated[float, Field(ge=0)] = 1.0
    """Weight of naming what lies in each patch beside the answers."""
    places: Annotated[float, Field(ge=0)] = 1.0
    """Weight of telling where in the picture each patch lies."""
    lr: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] | None = None
    """Learning rate at the first and at the last step, with a straight line between; None: the optimizer's."""

    @model_validator(mode="after")
    def _every_picture_has_questions(self) -> LlavaPhase:
        if set(self.kinds) == {"position"}:
            raise ValueError("kinds: a picture of one object has no positions; add another kind")
        return self


class LlavaTraining(Training):
    """`tokensieve train configs/embedded_llava.yaml`: a LLaVA learns to answer questions on a CLIP's vision tower."""

    task: Literal["llava"]
    output: Path
    start: str = "scenes-v1"
    """The embedded weights whose vision tower it begins with."""
    layers: Count = 12
    """Layers of the language model."""
    seed: Annotated[int, Field(ge=0)] = 0
    optimizer: Optimizer = Optimizer()
    horizon: Count | None = None
    """For how many steps the optimizer's learning rate is planned; None: for all."""
    phases: Annotated[tuple[LlavaPhase, ...], Field(min_length=1)]
    threads: Count | None = None
    checkpoint_every: Count = 50
    evaluate: bool = True
    """At the end, measure on the val and test splits and write it to card.json."""

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @model_validator(mode="after")
    def _numbers_fit(self) -> LlavaTraining:
        self.optimizer.check(self.steps)
        if any(phase.layers is not None and phase.layers > self.layers for phase in self.phases):
            raise ValueError(f"phases: there are no more than the {self.layers} layers")
        return self
