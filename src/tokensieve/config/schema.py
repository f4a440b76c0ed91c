"""What the files of all trainings share: search and manager settings, and the sections of the embedded recipes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from tokensieve.config.search import Manager, Search
from tokensieve.config.section import Count, CountOrZero, Fraction, PairBatch, Positive, Probability, Rate, Section, Weight


class Training(Section):
    """A file of `tokensieve train` and `tokensieve search`. Its `task` is the name of its declaration (registry.py).

    A training also has `output`, `threads` (or None), and, unless its learner has them, `steps` and `checkpoint_every`.
    """

    several_processes: ClassVar[bool] = False
    """Whether it can be trained by several processes at once, each with a GPU."""
    output_key: ClassVar[str] = "output"
    """The key of the folder of a run."""
    examples: ClassVar[dict[str, str]] = {}
    """Lines for sections that a file has to have, to be pasted into one that lacks them."""

    manager_settings: Manager = Manager()
    search_settings: Search = Search()

    @property
    def searches(self) -> bool:
        """Whether `tokensieve train` starts a search: either switch turns it on."""
        return self.manager_settings.mode == "optuna" or self.search_settings.enable

    @model_validator(mode="after")
    def _check_processes(self) -> Training:
        if self.manager_settings.gpus_per_subtask > 1 and not self.several_processes:
            raise ValueError("manager_settings.gpus_per_subtask: this is trained by one process, on one GPU; write 1")
        return self

    @classmethod
    def default_space(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """The space of a search whose file names none, by the values of the file; empty: a file has to name it."""
        return {}

    def check_files(self) -> Iterable[tuple[str, str]]:
        """Problems with what the file refers to, such as missing data: the path of a key, and a message."""
        return ()

    def notes(self) -> Iterable[str]:
        """Remarks on what the file refers to that are not errors."""
        return ()


class Phase(Section):
    """A phase of training on pictures of one kind."""

    steps: Count
    batch: PairBatch = 64
    canvas: Annotated[int, Field(ge=8, le=112, multiple_of=8)] = 112
    """Side of the window that is cut from each picture, in pixels: a smaller one costs less."""
    level: tuple[Fraction, Fraction] = (1.0, 1.0)
    """Difficulty of the scenes at the first and at the last step."""
    several: Probability = 0.0
    """Share of pictures with several objects, whose captions name all of them. Needs the full canvas."""

    @model_validator(mode="after")
    def _check_several(self) -> Phase:
        if self.several and self.canvas < 112:
            raise ValueError("several > 0 needs canvas: 112, since captions name what a smaller window may not show")
        return self


class Optimizer(Section):
    """Muon for the matrices of the blocks, AdamW for the rest; one learning rate, warm-up, then half a cosine."""

    lr: Rate = 2e-3
    floor: Fraction = 0.01
    """The last learning rate, as a fraction of the first."""
    warmup: CountOrZero = 100
    weight_decay: Weight = 0.01
    clip: Positive = 1.0
    """Maximum norm of the gradient of AdamW's parameters."""

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, of `steps` in all."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / (steps - self.warmup)
        return self.lr * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)

    def check_warmup(self, steps: int) -> None:
        """A ValueError if the warm-up would last the whole training."""
        if self.warmup >= steps:
            raise ValueError(f"optimizer.warmup: {self.warmup} is not less than the {steps} steps of the training")
