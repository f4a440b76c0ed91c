"""`tokensieve search CONFIG`: Optuna searches over the keys that search_settings name, with a training for each trial.

    <output>/study.db               all trials (SQLite; or the database that manager_settings.storage names)
    <output>/trials/<number>/       a trial: config.yaml, and all that `tokensieve train` writes, result.json with its numbers
    <output>/best.yaml, trials.csv, *.png    written at the end (results.py)

This process asks Optuna for values, writes the trial's folder, and starts a worker process for it on the CPU or on its GPUs
(trial.py). A trial whose worker dies is started again, from its checkpoint. If this process dies too, the heartbeats of its
trials stop, and the next search of the same study starts them again. Only this process asks for values, so there are never too
many trials.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve import config, files
from tokensieve.config import search_space, yaml_tree
from tokensieve.config.schema import Training
from tokensieve.config.search import Manager
from tokensieve.errors import UserError, WriteError
from tokensieve.plugins import plugin_files
from tokensieve.search.space import objective_values, short, short_names, suggest, with_values
from tokensieve.search.study import (
    HEARTBEAT,
    INTERRUPTED,
    INVALID,
    OWNER,
    RETRIES,
    distinct_trials,
    first_number,
    import_optuna,
    open_study,
    requeue_callback,
    storage_of,
    storage_url,
    without_warnings,
)
from tokensieve.search.trial import CANNOT_WRITE
from tokensieve.terminal import progress
from tokensieve.training.launch import cuda_devices, torchrun
from tokensieve.training.tracking import PROJECT, PROJECT_GROUP, import_wandb

if TYPE_CHECKING:
    import optuna


WORKER = ("-m", "tokensieve.search.trial")
OUTCOMES = ("complete", "pruned", "failed", "interrupted")  # what a worker writes
PAUSE = 0.2
CPU = "the CPU"
GRACE = 60  # seconds that a worker has to save a checkpoint when the search stops
MAX_FAILED, MAX_INVALID = 3, 10  # the search stops after this many failed, or failed and invalid, trials if there are no others


@dataclass(frozen=True)
class Slot:
    """Room for one trial at a time: environment variables of its worker, and the number of its processes."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1

    def command(self, snapshot: Path, folder: Path, trial_id: int) -> list[str]:
        task = [*WORKER, str(snapshot), str(folder), str(trial_id), *plugin_files()]
        if self.processes == 1:
            return [sys.executable, *task]
        return [*torchrun(self.processes), *task]


def find_slots(manager: Manager, gpus: Sequence[str]) -> list[Slot]:
    """Slots for workers: groups of the GPUs that may be used, else the CPU. gpus: the names of those CUDA sees."""
    if not manager.available_gpus or not gpus:
        count = manager.n_workers or 1
        threads = max(1, (os.cpu_count() or 1) // count)
        variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
        return [Slot(CPU, variables)] * count
    beyond = [number for number in manager.available_gpus if number >= len(gpus)]
    if beyond:
        raise UserError(f"manager_settings.available_gpus: {beyond} do not exist; there are {list(range(len(gpus)))}")
    each = manager.gpus_per_subtask
    groups = [manager.available_gpus[i : i + each] for i in range(0, len(manager.available_gpus) - each + 1, each)]
    return [
        Slot(f"GPU {', '.join(map(str, group))}", {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i] for i in group)}, each)
        for group in groups[: manager.n_workers]
    ]


@dataclass
class Running:
    """A trial and the process that trains it."""

    trial: optuna.Trial
    number: int
    folder: Path
    slot: Slot
    process: subprocess.Popen[bytes]


class Searching:
    """A search: the study, the free slots, and the running trials."""

    study: optuna.Study
    storage: Any

    def __init__(
        self,
        path: str | Path,
        folder: Path,
        quiet: bool,
        overrides: Mapping[str, str] | None = None,
        wandb: str | None = None,
    ) -> None:
        self.optuna = import_optuna()
        self.tracking = {} if wandb is None else {PROJECT: wandb, PROJECT_GROUP: str(folder)}
        if wandb is not None:
            import_wandb()
        self.config: Training = config.load(path, overrides, searching=True)
        config.check_files(path, self.config, overrides)
        self.search, manager = self.config.search_settings, self.config.manager_settings
        if not self.search.space:
            raise UserError(f"{path}: search_settings.space: {search_space.nothing_to_search(type(self.config))}")
        document = config.read(path, overrides)
        self.data, self.folder, self.quiet = document.data, folder, quiet
        settings = self.data.get("search_settings") or {}
        if not settings.get("space"):  # that of the training, so that every file of the search names it
            space = self.search.model_dump(mode="json", exclude_defaults=True)["space"]
            self.data["search_settings"] = {**settings, "space": space}
            self.print(f"search_settings.space is not given; searching {', '.join(short_names(space).values())}")
        self.schema = type(self.config)
        with_values(self.data, dict.fromkeys(self.search.space), (self.schema.output_key, folder))  # are all paths in the file?
        self.free = find_slots(manager, cuda_devices() if manager.available_gpus else [])
        if manager.available_gpus and self.free[0].name == CPU:
            self.print(f"there is no CUDA device: trials run on the CPU, {len(self.free)} at a time")
        self.name = manager.study_name or document.path.stem
        self.snapshot = folder / "search.yaml"  # the workers read this copy: the file may change
        self.running: list[Running] = []
        self.is_stopping = False
        self.began, self.last_heartbeat = time.monotonic(), -math.inf

    def open(self) -> None:
        """Open the study. From here on files are written."""
        manager = self.config.manager_settings
        self.study = open_study(self.data, self.config, self.folder, self.name)
        self.storage = storage_of(self.study)
        study = {"storage": storage_url(manager, self.folder), "study_name": self.name}
        settings = self.data | {"manager_settings": self.data.get("manager_settings", {}) | study}
        files.write_text(self.snapshot, yaml_tree.write(settings))

    def print(self, text: str) -> None:
        """A line above the progress bar."""
        if not self.quiet:
            from tqdm import tqdm

            tqdm.write(text, file=sys.stderr)

    def run(self) -> None:
        """Run all trials that are left. Whatever ends it, no worker stays behind."""
        before = sum(trial.state.is_finished() for trial in distinct_trials(self.study))  # no part of the rate
        with progress.bar(total=self.search.n_trials, initial=before, quiet=self.quiet, unit="trial") as self.bar:
            try:
                self.restart_lost_trials()
                while self.advance():
                    time.sleep(PAUSE)
            except BaseException:
                self.stop()
                raise

    def restart_lost_trials(self) -> None:
        """Queue trials again whose heartbeats stopped, and record a heartbeat of all others that run elsewhere.

        Those go on with their own, or stop within the grace period. Optuna alone would wait for ever for a trial whose search
        was killed before its first heartbeat, and for long if the clock was set back. A trial that was given up, but not yet
        queued again when its search ended, is queued too.
        """
        states = self.optuna.trial.TrialState
        with without_warnings():
            self.optuna.storages.fail_stale_trials(self.study)
            for trial in distinct_trials(self.study):
                reason = trial.user_attrs.get("reason")
                if trial.state == states.FAIL and reason in (None, INTERRUPTED):
                    requeue_callback(None if reason else RETRIES)(self.study, trial)
        for trial in self.study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            self.storage.record_heartbeat(trial._trial_id)

    def advance(self) -> bool:
        """Record trials that ended, send heartbeats, and start trials in free slots. False once nothing is left to do."""
        ended = [one for one in self.running if one.process.poll() is not None]
        for one in ended:
            self.record_end(one)
        due = time.monotonic() - self.last_heartbeat > HEARTBEAT
        if due:
            self.last_heartbeat = time.monotonic()
            for one in self.running:
                self.storage.record_heartbeat(one.trial._trial_id)
            with without_warnings():
                self.optuna.storages.fail_stale_trials(self.study)
        if not (ended or due):  # nothing can have changed, and a database query costs
            return True
        left = True
        while self.free and left:
            left = self.start(self.free[0])
        return left or bool(self.running) or self.others_run()

    def others_run(self) -> bool:
        """Whether trials run elsewhere. They end, or their heartbeats stop and they are started again here."""
        states = self.optuna.trial.TrialState
        return not self.is_late and any(self.study.get_trials(deepcopy=False, states=(states.RUNNING, states.WAITING)))

    @property
    def is_late(self) -> bool:
        return self.search.timeout is not None and time.monotonic() - self.began > self.search.timeout

    def start(self, slot: Slot) -> bool:
        """Start the next trial in a slot. False if there is none. A trial whose values make an invalid file ends at once."""
        while (trial := self.next_trial()) is not None:
            number = first_number(self.study.get_trials(deepcopy=False)[trial.number])
            folder = self.folder / "trials" / str(number)
            with without_warnings():
                values = {
                    key: suggest(trial, key, dimension, search_space.number_type(self.schema, key))
                    for key, dimension in self.search.space.items()
                }
            files.write_text(
                folder / "config.yaml", yaml_tree.write(with_values(self.data, values, (self.schema.output_key, folder)))
            )
            try:
                config.check_files(folder / "config.yaml", config.load(folder / "config.yaml"))
            except UserError as error:
                self.end(trial, number, "PRUNED", f"{INVALID}{error}")
                self.stop_if_all_fail()
                continue
            (folder / "outcome.json").unlink(missing_ok=True)
            with (folder / "worker.log").open("ab") as log:
                process = subprocess.Popen(
                    slot.command(self.snapshot, folder, trial._trial_id),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **slot.variables, **self.tracking, OWNER: str(os.getpid())},
                    start_new_session=True,  # Ctrl-C reaches this process only, which stops the workers
                )
            self.free.remove(slot)
            self.running.append(Running(trial, number, folder, slot, process))
            self.update_progress_bar()
            return True
        return False

    def next_trial(self) -> optuna.Trial | None:
        """A trial that waits to be started again, or a new one as long as there are fewer than n_trials."""
        states = self.optuna.trial.TrialState
        trials = self.study.get_trials(deepcopy=False)
        waits = any(trial.state == states.WAITING for trial in trials)
        new = len({first_number(trial) for trial in trials}) < self.search.n_trials
        if self.is_late or not (waits or new):
            return None
        with without_warnings():
            trial: optuna.Trial = self.study.ask()
        self.storage.record_heartbeat(trial._trial_id)
        return trial

    def record_end(self, one: Running) -> None:
        """Record the end of a worker: its trial is complete, pruned, failed, or started again."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(one.process.pid, signal.SIGKILL)  # child processes it may have left
        self.running.remove(one)
        self.free.append(one.slot)
        outcome, code = _outcome(one.folder), one.process.returncode
        if outcome is None and code == CANNOT_WRITE:  # of the disk, not of the trial's values: it is not lost
            self.restart(one, INTERRUPTED)
            raise WriteError(
                f"trial {one.number} could not write to {one.folder} ({_last_line(one.folder / 'worker.log')}); "
                "the same command again goes on with the search"
            )
        if outcome is None and self.is_stopping:
            self.restart(one, INTERRUPTED)
        elif outcome is None and code > 0 and one.slot.processes == 1:  # not killed: it could not even start
            self.end(one.trial, one.number, "FAIL", f"its process ended with {code}: {_last_line(one.folder / 'worker.log')}")
        elif outcome is None or outcome["state"] == "interrupted":
            reason = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with {code}"
            self.restart(one, INTERRUPTED if outcome else reason)
        elif outcome["state"] == "complete":
            try:
                self.end(one.trial, one.number, "COMPLETE", values=objective_values(one.folder, self.search.objectives))
            except UserError as error:
                self.end(one.trial, one.number, "FAIL", str(error))
                raise
            except ValueError as error:
                self.end(one.trial, one.number, "FAIL", str(error))
        else:
            self.end(
                one.trial, one.number, {"pruned": "PRUNED", "failed": "FAIL"}[outcome["state"]], str(outcome.get("reason"))
            )
        self.stop_if_all_fail()

    def restart(self, one: Running, reason: str) -> None:
        """Queue a trial again that did not end by itself."""
        states = self.optuna.trial.TrialState
        with suppress(self.optuna.exceptions.UpdateFinishedTrialError):  # another process has recorded it
            one.trial.set_user_attr("reason", reason)
            self.storage.set_trial_state_values(one.trial._trial_id, state=states.FAIL)
            with without_warnings():
                requeue_callback(None if reason == INTERRUPTED else RETRIES)(
                    self.study, self.storage.get_trial(one.trial._trial_id)
                )
        waiting = self.study.get_trials(deepcopy=False, states=(states.WAITING, states.RUNNING))
        queued = any(first_number(trial) == one.number for trial in waiting)
        then = "it is started again from its last checkpoint" if queued else f"given up after {RETRIES} restarts"
        self.print(f"trial {one.number}: {reason}; {then} (log in {one.folder}/worker.log)")
        self.update_progress_bar()

    def end(
        self, trial: optuna.Trial, number: int, state: str, reason: str = "", values: Sequence[float] | None = None
    ) -> None:
        with (
            without_warnings(),
            suppress(self.optuna.exceptions.UpdateFinishedTrialError),
        ):  # this process slept, and another gave the trial up
            if reason:
                trial.set_user_attr("reason", reason[:1000])
            self.study.tell(trial, values, state=self.optuna.trial.TrialState[state], skip_if_finished=True)
        names = short_names(trial.params)
        parameters = " ".join(f"{names[key]}={short(value)}" for key, value in trial.params.items())
        if values is not None:
            named = zip(self.search.objectives, values, strict=True)
            reason = ", ".join(f"{objective.name} {value:.6g}" for objective, value in named)
        self.print(f"trial {number}: {state.lower() + ': ' if values is None else ''}{reason} ({parameters})")
        self.update_progress_bar()

    def update_progress_bar(self) -> None:
        done = [trial for trial in distinct_trials(self.study) if trial.state.is_finished()]
        self.bar.n = len(done)
        words = [f"{len(self.running)} running"]
        complete = [trial for trial in done if trial.state.name == "COMPLETE"]
        if complete and len(self.search.objectives) == 1:
            words.append(f"best {self.search.objectives[0].name} {self.study.best_value:.6g}")
        self.bar.set_postfix_str(", ".join(words))

    def stop_if_all_fail(self) -> None:
        """A UserError if all trials fail."""
        done = [trial for trial in distinct_trials(self.study) if trial.state.is_finished()]
        failed = [trial for trial in done if trial.state.name == "FAIL"]
        bad = [trial for trial in done if trial in failed or trial.user_attrs.get("reason", "").startswith(INVALID)]
        if len(bad) == len(done) and (len(failed) >= MAX_FAILED or len(bad) >= MAX_INVALID):
            reason = (failed or bad)[-1].user_attrs.get("reason")
            raise UserError(
                f"all of the first {len(done)} trials failed, the last because: {reason}; see {self.folder / 'trials'}"
            )

    def stop(self) -> None:
        """Let the workers save their checkpoints and end; their trials are queued again."""
        self.is_stopping = True
        for one in self.running:
            one.process.terminate()
        if self.running:
            self.print(f"stopping {len(self.running)} trials")
        end = time.monotonic() + GRACE
        try:
            for one in self.running:
                with suppress(subprocess.TimeoutExpired):
                    one.process.wait(max(0.0, end - time.monotonic()))
        finally:
            for one in self.running:
                if one.process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(one.process.pid, signal.SIGKILL)
                    one.process.wait()
            for one in list(self.running):
                with suppress(Exception):  # the error that ended the search is reported already, and heartbeats stop anyway
                    self.record_end(one)


def _outcome(folder: Path) -> dict[str, str] | None:
    """How a worker ended, as it wrote itself; None if it could not."""
    try:
        outcome = files.read_json(folder / "outcome.json")
    except UserError:
        return None
    return outcome if isinstance(outcome, dict) and outcome.get("state") in OUTCOMES else None


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")
