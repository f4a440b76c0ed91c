"""The file of the training `llava_video`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tokensieve.config.schema import Training
from tokensieve.config.section import (
    Batch,
    Count,
    Depth,
    FilePath,
    KeepCheckpoints,
    Positive,
    Rate,
    Section,
    Seed,
    Threads,
    Weight,
)


class ClipPhase(Section):
    """A phase of training in which the learning rate changes evenly."""

    steps: Count
    lr: tuple[Rate, Rate]
    """At the first and at the last step."""
    time_layer: Depth = 3
    """The states behind so many layers of the language model have to tell when in the clip a token is."""


class LlavaVideoTraining(Training):
    """For example configs/embedded_llava_video.yaml. Begins with the embedded LLaVA, whose tower and projector are frozen."""

    task: Literal["llava_video"]
    output: FilePath
    layers: Depth = 6
    """How many layers of the LLaVA's language model are taken, evenly spread."""
    seed: Seed = 0
    phases: Annotated[tuple[ClipPhase, ...], Field(min_length=1, max_length=1000)]
    batch: Batch = 8
    """Clips in a step."""
    questions: Count = 16
    """The most questions about each clip."""
    clips: Count = 4000
    """Different clips, each seen forwards and backwards. Their tokens are kept in the folder of the run."""
    doings: Weight = 0.5
    """Weight of predicting what the object at each token does; that of the answers is 1."""
    times: Weight = 0.5
    """Weight of predicting when in the clip each token is."""
    weight_decay: Weight = 0.01
    clip: Positive = 1.0
    """Maximum norm of the gradient of AdamW's parameters."""
    threads: Threads | None = None
    checkpoint_every: Count = 50
    evaluate_every: Count = 100
    """After so many steps the model is evaluated on clips of the val split; the best one is what ships."""
    val_clips: Count = 100
    keep_checkpoints: KeepCheckpoints = 2
    evaluate: bool = True
    """At the end, measure on the test split and write the numbers to card.json."""

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase(self, index: int) -> tuple[ClipPhase, float]:
        """The phase of a step, and the learning rate of the step."""
        for phase in self.phases:
            if index < phase.steps:
                first, last = phase.lr
                return phase, first + (last - first) * index / max(1, phase.steps - 1)
            index -= phase.steps
        raise IndexError(index)

    @model_validator(mode="after")
    def _check_numbers(self) -> LlavaVideoTraining:
        if self.clips < self.batch:
            raise ValueError(f"clips: {self.clips} are less than the {self.batch} of a step")
        if any(phase.time_layer > self.layers for phase in self.phases):
            raise ValueError(f"phases: time_layer is more than the {self.layers} layers")
        return self
