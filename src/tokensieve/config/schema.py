"""TODO docstring."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from tokensieve.config.search import Manager, Search
from tokensieve.config.section import Count, Fraction, Section


class Training(Section):
    """A file that can be trained, and searched."""

    several_processes: ClassVar[bool] = False
    """Whether it can be trained by several processes at once, each with a GPU."""

    manager_settings: Manager = Manager()
    search_settings: Search = Search()

    @property
    def searches(self) -> bool:
        """Whether `tokensieve train` makes a search of it: either switch turns it on."""
        return self.manager_settings.mode == "optuna" or self.search_settings.enable

    @model_validator(mode="after")
    def _processes_fit(self) -> Training:
        if self.manager_settings.gpus_per_subtask > 1 and not self.several_processes:
            raise ValueError("manager_settings.gpus_per_subtask: this is trained by one process, on one GPU; write 1")
        return self

    def check_files(self) -> Iterable[tuple[str, str]]:
        """What is wrong outside the file, such as data that is not there: the path of a key, and a message."""
        return ()

    def notes(self) -> Iterable[str]:
        """What is odd outside the file, and yet no error."""
        return ()


class Phase(Section):
    """A stretch of training on pictures of one kind."""

    steps: Count
    batch: Annotated[int, Field(ge=2)] = 64
    canvas: Annotated[int, Field(ge=8, le=112, multiple_of=8)] = 112
    """Side of the window that is cut from each picture, in pixels: a smaller one costs less."""
    level: tuple[Fraction, Fraction] = (1.0, 1.0)
    """Difficulty of the scenes at the first and at the last step."""
    several: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of pictures with several objects, which have captions that tell them all. Needs the full canvas."""

    @model_validator(mode="after")
    def _several_fit(self) -> Phase:
        if self.several and self.canvas < 112:
            raise ValueError("several > 0 needs canvas: 112, since captions tell what a smaller window may not show")
        return self


class Optimizer(Section):
    """Muon for the matrices of the blocks, AdamW for the rest; one learning rate, warm-up, then half a cosine."""

    lr: Annotated[float, Field(gt=0)] = 2e-3
    floor: Fraction = 0.01
    """The last learning rate, as a part of the first."""
    warmup: Annotated[int, Field(ge=0)] = 100
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient of AdamW's part."""

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of one of so many steps."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / (steps - self.warmup)
        return self.lr * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)

    def check(self, steps: int) -> None:
        """A ValueError if the warm-up would last the whole training."""
        if self.warmup >= steps:
            raise ValueError(f"optimizer.warmup: {self.warmup} is not less than the {steps} steps of the training")


OUTPUT_KEYS = ("output", "OUTPUT_DIR")  # how files call the folder of a run
