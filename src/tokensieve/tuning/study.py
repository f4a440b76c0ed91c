"""The record of a search: two Optuna studies in one SQLite file, the cheap trials and the measured plans.

Everything that decides what is tried next is in it, so a search that was killed goes on where it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve import provenance
from tokensieve.errors import UserError
from tokensieve.search.study import import_optuna, mixed_seed, storage_reason, without_warnings

if TYPE_CHECKING:
    import optuna

FILE = "study.db"
ABOUT = "tokensieve"  # the user attribute with what the studies of a folder share


@dataclass(frozen=True)
class Trial:
    """A plan that was tried on a few images: a cheap trial."""

    plan: str
    candidate: dict[str, Any]
    goal: float | None  # the speed-up that its budget was made for
    speedup: float  # predicted
    distance: float
    stderr: float
    gflops: float
    tokens: int


@dataclass(frozen=True)
class Measured:
    """A plan that was run on all images and timed."""

    plan: str
    role: str  # "search" or "control"
    candidate: dict[str, Any]
    goal: float | None
    speedup: float
    speedup_oracle: float
    seconds: float
    seconds_full: float
    gflops: float
    tokens: int
    values: dict[str, list[float]]  # by measure, of every image
    notes: list[str]


class Record:
    """The studies of one folder for one objective."""

    def __init__(self, folder: Path, about: Mapping[str, Any], objective: Mapping[str, Any], seed: int) -> None:
        optuna = import_optuna()
        self._optuna, self.folder, self._seed = optuna, folder, seed
        url = f"sqlite:///{os.path.realpath(folder / FILE)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with without_warnings():
                self._storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
        except Exception as error:  # SQLAlchemy and Optuna each have their own
            raise UserError(f"the study {folder / FILE} cannot be opened: {storage_reason(error)}") from None
        self._check(about)
        key = provenance.digest(objective)[:12]
        self.search = self._open(f"search {key}", ["minimize", "maximize"], about)
        self.measured = self._open(f"measured {key}", ["minimize"], about)
        self.start()
        self._spent_before = float(self.search.user_attrs.get("spent", 0.0))
        self._trials: list[Trial] | None = None

    def _check(self, about: Mapping[str, Any]) -> None:
        """A UserError if the folder holds a search of another model or other images."""
        for summary in self._optuna.get_all_study_summaries(self._storage):
            known = summary.user_attrs.get(ABOUT, {})
            different = [name for name in known if name in about and known[name] != about[name]]
            if different:
                raise UserError(
                    f"{self.folder} holds a search with another {' and another '.join(different)}; give another folder with "
                    "--output, or remove it"
                )

    def claim(self, name: str, value: str) -> None:
        """Adds something that the studies of the folder share; a UserError if they have another one."""
        self._check({name: value})
        for study in (self.search, self.measured):
            study.set_user_attr(ABOUT, {**study.user_attrs[ABOUT], name: value})

    def _open(self, name: str, directions: Sequence[str], about: Mapping[str, Any]) -> optuna.Study:
        with without_warnings():
            study: optuna.Study = self._optuna.create_study(
                storage=self._storage, study_name=name, directions=list(directions), load_if_exists=True
            )
            study.set_user_attr(ABOUT, {**study.user_attrs.get(ABOUT, {}), **about})
            count = len(study.get_trials(deepcopy=False))
            study.sampler = self._optuna.samplers.TPESampler(
                seed=mixed_seed([self._seed, count]), multivariate=True, group=True, n_startup_trials=12
            )
        return study

    def start(self) -> None:
        """Starts the clock of this run."""
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds spent on this search, in all runs."""
        return self._spent_before + time.monotonic() - self._started

    def remember(self, name: str, make: Any) -> Any:
        """A decision that depends on times: made once, and the same after a kill."""
        if name not in self.search.user_attrs:
            self.search.set_user_attr(name, make())
        return self.search.user_attrs[name]

    # --- cheap trials

    def enqueue(self, seeds: Sequence[Mapping[str, Any]]) -> None:
        """Has these parameters tried first, if the search is new."""
        if not self.search.get_trials(deepcopy=False):
            for params in seeds:
                self.search.enqueue_trial(dict(params))

    def ask(self) -> optuna.Trial:
        with without_warnings():
            return self.search.ask()

    def reject(self, trial: optuna.Trial) -> None:
        """A plan that cannot be made."""
        self.search.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def add(self, trial: optuna.Trial, values: Sequence[float], row: Trial) -> None:
        trial.set_user_attr("row", vars(row))
        self.search.tell(trial, list(values))
        self.search.set_user_attr("spent", self.seconds)
        self.trials.append(row)

    @property
    def trials(self) -> list[Trial]:
        """The cheap trials so far."""
        if self._trials is None:
            rows = (trial.user_attrs.get("row") for trial in self.search.get_trials(deepcopy=False))
            self._trials = [Trial(**row) for row in rows if row is not None]
        return self._trials

    # --- measured plans

    def add_measured(self, row: Measured, distance: float) -> None:
        state = self._optuna.trial.create_trial(values=[distance], user_attrs={"row": vars(row)})
        self.measured.add_trial(state)
        self.search.set_user_attr("spent", self.seconds)

    @property
    def rows(self) -> list[Measured]:
        """The measured plans so far, each once."""
        rows = [trial.user_attrs["row"] for trial in self.measured.get_trials(deepcopy=False)]
        return list({row["plan"]: Measured(**row) for row in rows}.values())
