"""`tokensieve search CONFIG`: Optuna tries values for the keys that the file's search block names, a training for each.

    <output>/study.db               all trials (SQLite; or the database that manager_settings.storage names)
    <output>/trials/<number>/       a trial: config.yaml, and all that `tokensieve train` writes, result.json with its numbers
    <output>/best.yaml, trials.csv, *.png    written at the end (search_results.py)

This process asks Optuna for values, writes the trial's folder, and starts a worker process for it on the CPU or on its GPUs
(search_trial.py). A trial whose worker dies is begun again, from its checkpoint. If this process dies too, the heartbeats of
its trials stop, and they are begun again by whoever gives the command next. One process asks, so trials are never too many.
"""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve import config as configuration
from tokensieve import results, validation
from tokensieve.config import Dimension, Manager, Objective, Search, Training
from tokensieve.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import optuna

WORKER = ("-m", "tokensieve.search_trial")
OWNER = "TOKENSIEVE_SEARCH"  # the variable that tells a worker the search it belongs to, by its process id
HEARTBEAT = 10  # seconds from one sign of life to the next; after six without one a trial is begun again
RETRIES = 5
PAUSE = 0.2
CPU = "the CPU"
GRACE = 60  # seconds that a worker has to save a checkpoint when it is told to stop
INVALID = "invalid: "  # how the reason of a trial begins whose values make no valid file
FRUITLESS, HOPELESS = 3, 10  # so many failures, or failures and invalid trials, and nothing else end the search


@contextmanager
def quietly() -> Iterator[None]:
    """Without Optuna's remarks on what is experimental in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def library() -> Any:
    """Optuna, or a UserError that says how to get it."""
    try:
        import optuna
    except ImportError:
        raise UserError("a search needs Optuna, which is not installed: pip install 'tokensieve[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


# ------------------------------------------------------------------------------------------------------------ the study


def storage(url: str) -> optuna.storages.RDBStorage:
    """The database of a study, which notes whether trials are alive and queues those again that are not."""
    patience = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    try:
        with quietly():
            return library().storages.RDBStorage(
                url,
                engine_kwargs=patience,
                heartbeat_interval=HEARTBEAT,
                grace_period=6 * HEARTBEAT,
                heartbeat_stale_trial_callback=again(RETRIES),
            )
    except Exception as error:  # SQLAlchemy, the driver and Optuna each have their own
        told = " ".join(str(error).split())
        raise UserError(f"manager_settings.storage: {url.split('://')[0]}://... cannot be opened ({told[:300]})") from None


def again(most: int | None) -> Any:
    """What queues a trial again that was cut off, at most so many times."""
    with quietly():
        return library().storages.RetryHeartbeatStaleTrialCallback(max_retry=most, inherit_intermediate_values=True)


def pruner(search: Search) -> optuna.pruners.BasePruner:
    pruners = library().pruners
    name = search.pruner or ("median" if len(search.objectives) == 1 else "none")
    kinds = {"median": pruners.MedianPruner, "hyperband": pruners.HyperbandPruner, "none": pruners.NopPruner}
    made: optuna.pruners.BasePruner = kinds[name]()
    return made


def first_number(trial: optuna.trial.FrozenTrial) -> int:
    """The number under which a trial was first begun; its folder has this name."""
    number = trial.system_attrs.get("failed_trial")
    return trial.number if number is None else int(number)


def counted(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Every trial once: of one that was begun several times, the last."""
    last = {first_number(trial): trial for trial in study.get_trials(deepcopy=False)}
    return [last[number] for number in sorted(last)]


def begin(data: Mapping[str, Any], config: Training, folder: Path, name: str) -> optuna.Study:
    """The study of this file: a new one, or the one that was begun with the same space, objectives and other keys."""
    manager, search = config.manager_settings, config.search_settings
    url = manager.storage or f"sqlite:///{(folder / 'study.db').resolve()}"
    changing = ("manager_settings", "search_settings", *configuration.OUTPUTS)
    same = {key: value for key, value in data.items() if key not in changing}
    dumped = search.model_dump(mode="json")
    decided = {"space": dumped["space"], "objectives": dumped["objectives"], "other keys": same}
    prints = {key: results.digest(value) for key, value in decided.items()}
    with quietly():
        study: optuna.Study = library().create_study(
            storage=storage(url),
            study_name=name,
            directions=[objective.direction for objective in search.objectives],
            pruner=pruner(search),
            load_if_exists=True,
        )
    begun = study.user_attrs.get("tokensieve")
    if begun is None:
        if any((folder / "trials").glob("*")):
            raise UserError(f"{folder} holds the trials of another study; give another folder with --output")
        study.set_user_attr("tokensieve", prints)
    elif begun != prints:
        other = " and ".join(key for key in prints if begun.get(key) != prints[key])
        raise UserError(
            f"the study {name!r} was begun with another {other}; restore them, or begin a new one with --output"
            f"{' and manager_settings.study_name' if manager.storage else ''}"
        )
    seed = [search.seed, len(study.get_trials(deepcopy=False))]  # not the same draws again when a study goes on
    with quietly():
        study.sampler = library().samplers.TPESampler(seed=_mixed(seed), constant_liar=True)
    return study


def _mixed(seed: Sequence[int]) -> int:
    import numpy as np

    return int(np.random.SeedSequence(seed).generate_state(1)[0])


# ------------------------------------------------------------------------------------------------------------ one trial


def suggest(trial: optuna.Trial, key: str, dimension: Dimension, kind: type[int] | type[float] | None) -> Any:
    """The value that Optuna wants tried for a key."""
    if dimension.choices is not None:
        words = {word(choice): choice for choice in dimension.choices}
        return words[trial.suggest_categorical(key, list(words))]
    low, high, step = dimension.low, dimension.high, dimension.step
    assert low is not None and high is not None
    if kind is int:
        return trial.suggest_int(key, int(low), int(high), step=int(step or 1), log=dimension.log)
    value = trial.suggest_float(key, float(low), float(high), step=step, log=dimension.log)
    return float(f"{value:.12g}")  # 0.3, not 0.30000000000000004


def word(choice: Any) -> Any:
    """A choice as a database can keep it."""
    return choice if choice is None or isinstance(choice, (bool, int, float, str)) else json.dumps(choice)


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """The last words of each path, as many as tell it from the others: merge_ratio, token_merger.lr."""
    paths = [key.split(".") for key in keys]
    names = {}
    for path in paths:
        counts = range(1, len(path) + 1)
        own = next(n for n in counts if n == len(path) or sum(other[-n:] == path[-n:] for other in paths) == 1)
        names[".".join(path)] = ".".join(path[-max(own, 2 if path[-1].isdigit() or path[-1] == "lr" else 1) :])
    return names


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def with_values(data: Mapping[str, Any], values: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """The file with other values for some keys, and the search in it turned off."""
    made = copy.deepcopy(dict(data))
    for key, value in values.items():
        *above, last = configuration.key_path(key)
        inner: Any = made
        for part in above:
            if isinstance(inner, dict) and not isinstance(part, int) and inner.get(part) is None:
                inner[part] = {}
            inner = _at(inner, part, key)
        if isinstance(inner, list):
            _at(inner, last, key)
        inner[last] = value
    made["OUTPUT_DIR" if set(configuration.REID) & set(made) else "output"] = str(output)
    if "manager_settings" in made:
        made["manager_settings"] = {k: v for k, v in made["manager_settings"].items() if k != "storage"} | {"mode": "single"}
    if "search_settings" in made:
        made["search_settings"] = made["search_settings"] | {"enable": False}
    return made


def _at(inner: Any, part: int | str, key: str) -> Any:
    try:
        return inner[part]
    except (KeyError, IndexError, TypeError):
        raise UserError(f"search_settings.space: {key}: the file has no {part} there; write the whole list out in it") from None


def numbers(result: Mapping[str, Any], above: str = "") -> dict[str, float | None]:
    """The numbers of a result by their paths; None where one was not finite."""
    found: dict[str, float | None] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{above}{key}.")
        elif value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            found[f"{above}{key}"] = value
    return found


def objective_values(folder: Path, objectives: Sequence[Objective]) -> list[float]:
    """What a finished trial reached. UserError if its result has no such number; ValueError if it was not finite."""
    path = folder / "result.json"
    measured = numbers(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    values = []
    for objective in objectives:
        if objective.name not in measured:
            known = ", ".join(measured) or "nothing: it was not evaluated"
            hint = did_you_mean(objective.name, measured)
            raise UserError(
                f"search_settings.objectives: {path} has no number {objective.name!r}; it has {known}.{hint} "
                "Correct it and begin again with another --output"
            )
        value = measured[objective.name]
        if value is None:
            raise ValueError(f"{objective.name} is not finite")
        values.append(float(value))
    return values


# --------------------------------------------------------------------------------------------------- where workers run


@dataclass(frozen=True)
class Place:
    """Room for one trial at a time: environment variables of its worker, and in how many processes it trains."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1

    def command(self, snapshot: Path, folder: Path, trial_id: int) -> list[str]:
        task = [*WORKER, str(snapshot), str(folder), str(trial_id)]
        if self.processes == 1:
            return [sys.executable, *task]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
        return [sys.executable, *launcher, *task]


def places(manager: Manager, gpus: Sequence[str]) -> list[Place]:
    """Room for workers: groups of the GPUs that may be used (`gpus`: what CUDA calls those there are), else the CPU."""
    if not manager.available_gpus or not gpus:
        count = manager.n_workers or 1
        threads = max(1, (os.cpu_count() or 1) // count)
        variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
        return [Place(CPU, variables)] * count
    beyond = [number for number in manager.available_gpus if number >= len(gpus)]
    if beyond:
        raise UserError(f"manager_settings.available_gpus: {beyond} are not there; there are {list(range(len(gpus)))}")
    each = manager.gpus_per_subtask
    groups = [manager.available_gpus[i : i + each] for i in range(0, len(manager.available_gpus) - each + 1, each)]
    return [
        Place(f"GPU {', '.join(map(str, group))}", {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i] for i in group)}, each)
        for group in groups[: manager.n_workers]
    ]


def cuda_devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES would call the GPUs that this process sees."""
    import torch

    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return seen or [str(i) for i in range(torch.cuda.device_count())]


# ------------------------------------------------------------------------------------------------------------ the search


@dataclass
class Running:
    """A trial and the process that trains it."""

    trial: optuna.Trial
    number: int
    folder: Path
    place: Place
    process: subprocess.Popen[bytes]


class Searching:
    """A search on its way: the study, the room for workers, and the trials that run."""

    def __init__(self, path: Path, folder: Path, quiet: bool) -> None:
        self.optuna = library()
        self.config: Training = configuration.load(path)
        configuration.check_outside(path, self.config)
        self.search, manager = self.config.search_settings, self.config.manager_settings
        if not self.search.space:
            raise UserError(f"{path}: search_settings.space: {configuration.nothing_to_search(type(self.config))}")
        self.data, self.folder, self.quiet = validation.Document(path).data, folder, quiet
        self.schema = type(self.config)
        with_values(self.data, dict.fromkeys(self.search.space), folder)  # a UserError if a key has no place in the file
        self.free = places(manager, cuda_devices() if manager.available_gpus else [])
        if manager.available_gpus and self.free[0].name == CPU:
            self.say(f"no CUDA device is there: trials run on the CPU, {len(self.free)} at a time")
        folder.mkdir(parents=True, exist_ok=True)
        name = manager.study_name or path.stem
        self.study = begin(self.data, self.config, folder, name)
        self.storage = storage_of(self.study)
        self.running: list[Running] = []
        self.began, self.beaten = time.monotonic(), -math.inf
        found = {"storage": manager.storage or f"sqlite:///{(folder / 'study.db').resolve()}", "study_name": name}
        settings = self.data | {"manager_settings": self.data.get("manager_settings", {}) | found}
        self.snapshot = folder / "search.yaml"  # what the workers read, whatever happens to the file meanwhile
        results.write_text(self.snapshot, yaml_text(settings))

    def say(self, text: str) -> None:
        if not self.quiet:
            from tqdm import tqdm

            tqdm.write(text, file=sys.stderr)

    def go(self) -> None:
        """Do all trials that are still to be done. Whatever ends it, no worker is left."""
        from tqdm import tqdm

        with tqdm(total=self.search.n_trials, disable=self.quiet, unit="trial", dynamic_ncols=True) as self.bar:
            try:
                while self.move():
                    time.sleep(PAUSE)
            except BaseException:
                self.stop()
                raise

    def move(self) -> bool:
        """Look after what runs, and fill the room there is. False once nothing is left to do."""
        ended = [one for one in self.running if one.process.poll() is not None]
        for one in ended:
            self.settle(one)
        beat = time.monotonic() - self.beaten > HEARTBEAT
        if beat:
            self.beaten = time.monotonic()
            for one in self.running:
                self.storage.record_heartbeat(one.trial._trial_id)
            with quietly():
                self.optuna.storages.fail_stale_trials(self.study)
        if not (ended or beat):  # nothing can have changed, and asking a database costs
            return True
        left = True
        while self.free and left:
            left = self.start(self.free[0])
        return left or bool(self.running) or self.others()

    def others(self) -> bool:
        """Whether trials run elsewhere: they end, or their heartbeats do, and then they are to be done here."""
        states = self.optuna.trial.TrialState
        return not self.late and any(self.study.get_trials(deepcopy=False, states=(states.RUNNING, states.WAITING)))

    @property
    def late(self) -> bool:
        return self.search.timeout is not None and time.monotonic() - self.began > self.search.timeout

    def start(self, place: Place) -> bool:
        """Begin the next trial there. False if there is none. Values that make an invalid file end a trial at once."""
        while (trial := self.next_trial()) is not None:
            number = first_number(self.study.get_trials(deepcopy=False)[trial.number])
            folder = self.folder / "trials" / str(number)
            with quietly():
                values = {
                    key: suggest(trial, key, dimension, configuration.number_type(self.schema, key))
                    for key, dimension in self.search.space.items()
                }
            folder.mkdir(parents=True, exist_ok=True)
            results.write_text(folder / "config.yaml", yaml_text(with_values(self.data, values, folder)))
            try:
                configuration.check_outside(folder / "config.yaml", configuration.load(folder / "config.yaml"))
            except UserError as error:
                self.end(trial, number, "PRUNED", f"{INVALID}{error}")
                self.check_fruit()
                continue
            (folder / "outcome.json").unlink(missing_ok=True)
            with (folder / "worker.log").open("ab") as log:
                process = subprocess.Popen(
                    place.command(self.snapshot, folder, trial._trial_id),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **place.variables, OWNER: str(os.getpid())},
                    start_new_session=True,  # so that Ctrl-C comes here, and from here to the workers
                )
            self.free.remove(place)
            self.running.append(Running(trial, number, folder, place, process))
            self.told()
            return True
        return False

    def next_trial(self) -> optuna.Trial | None:
        """One that waits to be begun again, or a new one as long as there are fewer than n_trials."""
        states = self.optuna.trial.TrialState
        trials = self.study.get_trials(deepcopy=False)
        waits = any(trial.state == states.WAITING for trial in trials)
        new = len({first_number(trial) for trial in trials}) < self.search.n_trials
        if self.late or not (waits or new):
            return None
        with quietly():
            trial: optuna.Trial = self.study.ask()
        self.storage.record_heartbeat(trial._trial_id)
        return trial

    def settle(self, one: Running) -> None:
        """A worker has ended: its trial is complete, pruned, failed, or to be done again."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(one.process.pid, signal.SIGKILL)  # whatever it may have left
        self.running.remove(one)
        self.free.append(one.place)
        outcome, code = _outcome(one.folder), one.process.returncode
        if outcome is None and code > 0 and one.place.processes == 1:  # not killed: it could not even begin
            self.end(one.trial, one.number, "FAIL", f"its process ended with {code}: {_last_line(one.folder / 'worker.log')}")
        elif outcome is None or outcome["state"] == "interrupted":
            why = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with {code}"
            self.begin_again(one, "interrupted" if outcome else why)
        elif outcome["state"] == "complete":
            try:
                self.end(one.trial, one.number, "COMPLETE", values=objective_values(one.folder, self.search.objectives))
            except UserError as error:
                self.end(one.trial, one.number, "FAIL", str(error))
                raise
            except ValueError as error:
                self.end(one.trial, one.number, "FAIL", str(error))
        else:
            self.end(one.trial, one.number, {"pruned": "PRUNED", "failed": "FAIL"}[outcome["state"]], outcome["reason"])
        self.check_fruit()

    def begin_again(self, one: Running, why: str) -> None:
        states = self.optuna.trial.TrialState
        with suppress(self.optuna.exceptions.UpdateFinishedTrialError):  # another process saw it die as well
            one.trial.set_user_attr("reason", why)
            self.storage.set_trial_state_values(one.trial._trial_id, state=states.FAIL)
            with quietly():
                again(None if why == "interrupted" else RETRIES)(self.study, self.storage.get_trial(one.trial._trial_id))
        waiting = self.study.get_trials(deepcopy=False, states=(states.WAITING, states.RUNNING))
        queued = any(first_number(trial) == one.number for trial in waiting)
        then = "it is to be begun again, from its last checkpoint" if queued else f"{RETRIES} times begun again, it is given up"
        self.say(f"trial {one.number}: {why}; {then} (log in {one.folder}/worker.log)")
        self.told()

    def end(self, trial: optuna.Trial, number: int, state: str, why: str = "", values: Sequence[float] | None = None) -> None:
        with quietly(), suppress(self.optuna.exceptions.UpdateFinishedTrialError):  # this one slept, and another gave it up
            if why:
                trial.set_user_attr("reason", why[:1000])
            self.study.tell(trial, values, state=self.optuna.trial.TrialState[state], skip_if_finished=True)
        names = short_names(trial.params)
        shown = " ".join(f"{names[key]}={short(value)}" for key, value in trial.params.items())
        if values is not None:
            named = zip(self.search.objectives, values, strict=True)
            why = ", ".join(f"{objective.name} {value:.6g}" for objective, value in named)
        self.say(f"trial {number}: {state.lower() + ': ' if values is None else ''}{why} ({shown})")
        self.told()

    def told(self) -> None:
        """Bring the bar up to date."""
        done = [trial for trial in counted(self.study) if trial.state.is_finished()]
        self.bar.n = len(done)
        words = [f"{len(self.running)} running"]
        complete = [trial for trial in done if trial.state.name == "COMPLETE"]
        if complete and len(self.search.objectives) == 1:
            words.append(f"best {self.search.objectives[0].name} {self.study.best_value:.6g}")
        self.bar.set_postfix_str(", ".join(words))

    def check_fruit(self) -> None:
        """A UserError if trials do nothing but fail."""
        done = [trial for trial in counted(self.study) if trial.state.is_finished()]
        failed = [trial for trial in done if trial.state.name == "FAIL"]
        bad = [trial for trial in done if trial in failed or trial.user_attrs.get("reason", "").startswith(INVALID)]
        if len(bad) == len(done) and (len(failed) >= FRUITLESS or len(bad) >= HOPELESS):
            why = (failed or bad)[-1].user_attrs.get("reason")
            raise UserError(
                f"all of the first {len(done)} trials failed, the last because: {why}; see {self.folder / 'trials'}"
            )

    def stop(self) -> None:
        """Let the workers save their checkpoints and end; their trials wait to be begun again."""
        for one in self.running:
            one.process.terminate()
        if self.running:
            self.say(f"stopping {len(self.running)} trials")
        end = time.monotonic() + GRACE
        try:
            for one in self.running:
                with suppress(subprocess.TimeoutExpired):
                    one.process.wait(max(0.0, end - time.monotonic()))
        finally:
            for one in list(self.running):
                if one.process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(one.process.pid, signal.SIGKILL)
                    one.process.wait()
                with suppress(UserError):  # what ended the search is told already
                    self.settle(one)


def storage_of(study: optuna.Study) -> Any:
    """The database behind a study (Optuna puts a cache before it)."""
    return getattr(study._storage, "_backend", study._storage)


def _outcome(folder: Path) -> dict[str, str] | None:
    """What a worker said at its end; None if it could not."""
    try:
        said: dict[str, str] = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
        return said
    except (OSError, ValueError):
        return None


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def yaml_text(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def run(path: str | Path, output: str | Path | None = None, quiet: bool = False) -> Path:
    """Search what the file describes, or go on with it; the folder with all trials and the best files."""
    from tokensieve import search_results

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a search starts the processes of its trials itself; start it without torchrun, as tokensieve search")
    path = Path(path)
    folder = Path(output) if output is not None else configuration.load(path).output
    searching = Searching(path, folder, quiet)
    mode, enable = searching.config.manager_settings.mode, searching.search.enable
    if enable and mode == "single":
        searching.say("this is a search: search_settings.enable: true wins over manager_settings.mode: single")
    elif mode == "optuna" and not enable and "enable" in searching.search.model_fields_set:
        searching.say("this is a search: manager_settings.mode: optuna wins over search_settings.enable: false")
    try:
        searching.go()
    except (KeyboardInterrupt, SystemExit):
        searching.say(f"stopped; the same command goes on with the study in {folder}")
        raise
    finally:
        found = search_results.write(searching.study, searching.data, searching.search, folder)
    if not found:
        raise UserError(f"no trial was completed; see {folder / 'trials.csv'} for the reasons")
    if not quiet:
        search_results.show(searching.study, searching.search, folder)
    return folder
