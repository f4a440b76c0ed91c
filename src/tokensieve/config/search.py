"""TODO docstring."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tokensieve.config.section import Count, Section


class Dimension(Section):
    """What a search tries for one key: numbers from low to high, or one of the choices."""

    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = None
    """Only every so many."""
    log: bool = False
    """As many trials from 1e-5 to 1e-4 as from 1e-4 to 1e-3."""
    choices: Annotated[tuple[Any, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Dimension:
        if self.choices is not None:
            if self.model_fields_set != {"choices"}:
                raise ValueError("choices stand alone, without low, high, step and log")
            return self
        if self.low is None or self.high is None:
            raise ValueError("give low and high, such as {low: 0.3, high: 0.6}, or {choices: [...]}")
        if self.low > self.high:
            raise ValueError(f"low: {self.low} is above high: {self.high}")
        if self.step is not None and (self.log or self.step <= 0):
            raise ValueError("step: must be above 0" if self.step <= 0 else "step: cannot be combined with log: true")
        if self.log and self.low <= 0:
            raise ValueError(f"low: {self.low} must be above 0 with log: true")
        return self


class Objective(Section):
    """A number of result.json that a search makes large or small."""

    name: str
    direction: Literal["maximize", "minimize"] = "maximize"


class Search(Section):
    """What a search tries, and what it looks for; see docs/search.md."""

    enable: bool = False
    n_trials: Count = 50
    space: dict[str, Dimension] = Field(default_factory=dict)
    """For any key of the file, by its path, such as method_settings.merge_ratio: {low: 0.3, high: 0.6}."""
    objectives: Annotated[tuple[Objective, ...], Field(min_length=1)] = (Objective(name="accuracy_hard"),)
    """One, or several for the trials that no other one beats in all of them."""
    pruner: Literal["median", "hyperband", "none"] | None = None
    """What ends bad trials early; None: median with one objective, none with several."""
    seed: Annotated[int, Field(ge=0)] = 0
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which no trial is begun any more."""

    @model_validator(mode="after")
    def _objectives_are_clear(self) -> Search:
        names = [objective.name for objective in self.objectives]
        if len(set(names)) < len(names):
            raise ValueError(f"objectives: {', '.join(names)}: each may stand there once")
        if len(names) > 1 and self.pruner not in (None, "none"):
            raise ValueError(f"pruner: {self.pruner} needs a single objective, and there are {len(names)}; write pruner: none")
        return self


class Manager(Section):
    """One training or a search over several, and where the trials of a search run."""

    mode: Literal["single", "optuna"] = "single"
    available_gpus: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Numbers of the GPUs that trials may use; none of them, or no CUDA: trials run on the CPU."""
    gpus_per_subtask: Count = 1
    """GPUs that a trial has for itself; with several it is trained in as many processes."""
    n_workers: Count | None = None
    """Trials at a time: on the CPU 1 if it is not given, on GPUs as many as there is room for."""
    storage: str | None = None
    """Where the study is kept, an address of a database as Optuna takes it; None: an SQLite file in the output folder."""
    study_name: str | None = None
    """None: the name of the file."""

    @model_validator(mode="after")
    def _gpus_suffice(self) -> Manager:
        given = self.available_gpus
        if len(set(given)) < len(given):
            raise ValueError(f"available_gpus: {list(given)} has one of them twice")
        if given and self.gpus_per_subtask > len(given):
            raise ValueError(f"gpus_per_subtask: {self.gpus_per_subtask} are more than the {len(given)} of available_gpus")
        if self.storage is not None and "://" not in self.storage:
            raise ValueError(f"storage: {self.storage!r} is no address; for example sqlite:///study.db")
        return self
