"""The sections search_settings and manager_settings: what a search tries, what it optimises, and where trials run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tokensieve.config.section import Batch, FreeValue, Index, Number, Positive, Problems, Section, Text, Threads

MAX_VALUES = 1e9  # of a range with a step


class Dimension(Section):
    """The values that a search tries for one key: numbers from low to high, or one of the choices."""

    low: Number | None = None
    high: Number | None = None
    step: Number | None = None
    """Distance between the numbers that are tried."""
    log: bool = False
    """Logarithmic: as many trials from 1e-5 to 1e-4 as from 1e-4 to 1e-3."""
    choices: Annotated[tuple[FreeValue, ...], Field(min_length=1, max_length=1000)] | None = None

    @model_validator(mode="after")
    def _check_range(self) -> Dimension:
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
        if self.step is not None and (self.high - self.low) / self.step > MAX_VALUES:
            raise ValueError(f"step: {self.step} makes more than {MAX_VALUES:g} values between low and high")
        if self.log and self.low <= 0:
            raise ValueError(f"low: {self.low} must be above 0 with log: true")
        return self


class Objective(Section):
    """A number of result.json that a search maximises or minimises."""

    name: Text
    direction: Literal["maximize", "minimize"] = "maximize"


class Search(Section):
    """What a search tries and optimises; see docs/search.md."""

    enable: bool = False
    n_trials: Batch = 50
    space: dict[str, Dimension] = Field(default_factory=dict)
    """For any key of the file, by its path, such as method_settings.merge_ratio: {low: 0.3, high: 0.6}."""
    objectives: Annotated[tuple[Objective, ...], Field(min_length=1, max_length=10)] = (Objective(name="accuracy_hard"),)
    """One, or several for a Pareto front."""
    pruner: Literal["median", "hyperband", "none"] | None = None
    """Stops bad trials early; None: median with one objective, none with several."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    timeout: Positive | None = None
    """Seconds after which no more trials are started."""

    @model_validator(mode="after")
    def _check_objectives(self) -> Search:
        names = [objective.name for objective in self.objectives]
        if len(set(names)) < len(names):
            raise ValueError(f"objectives: {', '.join(names)}: list each of them once")
        if len(names) > 1 and self.pruner not in (None, "none"):
            raise ValueError(f"pruner: {self.pruner} needs a single objective, but there are {len(names)}; write pruner: none")
        return self


class Manager(Section):
    """One training or a search over several, and where the trials of a search run."""

    mode: Literal["single", "optuna"] = "single"
    available_gpus: Annotated[tuple[Index, ...], Field(max_length=1000)] = ()
    """Indices of the GPUs that a training, or the trials of a search, may use; empty, or no CUDA: trials run on the CPU."""
    gpus_per_subtask: Threads = 1
    """GPUs of a training, or of each trial; with several it is trained in as many processes."""
    n_workers: Threads | None = None
    """Trials that run at the same time; None: on the CPU 1, on GPUs as many as fit."""
    storage: Text | None = None
    """Database of the study, a URL as Optuna takes it; None: an SQLite file in the output folder."""
    study_name: Text | None = None
    """None: the name of the file."""

    @model_validator(mode="after")
    def _check_gpus(self) -> Manager:
        gpus = self.available_gpus
        problems = []
        if len(set(gpus)) < len(gpus):
            problems.append(f"available_gpus: {list(gpus)} lists one of them twice")
        if gpus and self.gpus_per_subtask > len(gpus):
            problems.append(f"gpus_per_subtask: {self.gpus_per_subtask} are more than the {len(gpus)} of available_gpus")
        if self.storage is not None and "://" not in self.storage:
            problems.append(f"storage: {self.storage!r} is not a URL of a database; for example sqlite:///study.db")
        if problems:
            raise Problems(problems)
        return self
