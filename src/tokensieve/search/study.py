"""The Optuna study of a search: its database, pruner and trials."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve import provenance
from tokensieve.config.schema import Training
from tokensieve.config.search import Manager, Search
from tokensieve.errors import UserError, one_line
from tokensieve.installation.packages import naming_extras

if TYPE_CHECKING:
    import optuna


DATABASE = "study.db"
OWNER = "TOKENSIEVE_SEARCH"  # environment variable with the process id of the search that a worker belongs to
HEARTBEAT = 10  # seconds between heartbeats; a trial without one for six of them is started again
RETRIES = 5
INTERRUPTED = "interrupted"  # reason of a trial that is queued again, as often as it takes
INVALID = "invalid: "  # prefix of the reason of a trial whose values do not make a valid file


def storage_name(manager: Manager, folder: Path) -> str:
    """The name of the database for messages, without passwords."""
    if manager.storage:
        return f"manager_settings.storage: {manager.storage.split('://')[0]}://..."
    return f"the study {folder / DATABASE}"


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence Optuna's warnings about its experimental features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def import_optuna() -> Any:
    """Optuna, or a UserError with the command that installs it."""
    with naming_extras():
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def storage(manager: Manager, folder: Path) -> optuna.storages.RDBStorage:
    """The database of a study. It records heartbeats, and trials whose heartbeats stop are queued again."""
    url = storage_url(manager, folder)
    patience = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with without_warnings():
            return import_optuna().storages.RDBStorage(
                url,
                engine_kwargs=patience,
                heartbeat_interval=HEARTBEAT,
                grace_period=6 * HEARTBEAT,
                heartbeat_stale_trial_callback=requeue_callback(RETRIES),
            )
    except Exception as error:  # SQLAlchemy, the driver and Optuna each have their own
        raise UserError(f"{storage_name(manager, folder)} cannot be opened ({storage_reason(error)})") from None


def storage_url(manager: Manager, folder: Path) -> str:
    """The address of the database: the one that the file names, or a file in the folder of the search."""
    return manager.storage or f"sqlite:///{os.path.realpath(folder / DATABASE)}"


@contextmanager
def translate_storage_errors(name: str) -> Iterator[None]:
    """Errors of the database, such as a full disk, as a UserError of one line. name: of the database."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (import_optuna().exceptions.StorageInternalError, SQLAlchemyError) as error:
        reason = storage_reason(error)
        raise UserError(f"{name} cannot be written ({reason}); the same command again goes on with it") from error


def storage_reason(error: BaseException) -> str:
    """What the driver of the database says, without the statements that SQLAlchemy adds."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(getattr(error, "orig", None) or error, 300)


def requeue_callback(max_retry: int | None) -> Any:
    """The callback that queues an interrupted trial again, at most this many times (None: always)."""
    with without_warnings():
        return import_optuna().storages.RetryHeartbeatStaleTrialCallback(max_retry=max_retry, inherit_intermediate_values=True)


def pruner(search: Search) -> optuna.pruners.BasePruner:
    pruners = import_optuna().pruners
    name = search.pruner or ("median" if len(search.objectives) == 1 else "none")
    kinds = {"median": pruners.MedianPruner, "hyperband": pruners.HyperbandPruner, "none": pruners.NopPruner}
    made: optuna.pruners.BasePruner = kinds[name]()
    return made


def first_number(trial: optuna.trial.FrozenTrial) -> int:
    """The number of a trial's first start, which is the name of its folder."""
    number = trial.system_attrs.get("failed_trial")
    return trial.number if number is None else int(number)


def distinct_trials(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Every trial once: of one that was started several times, the last."""
    last = {first_number(trial): trial for trial in study.get_trials(deepcopy=False)}
    return [last[number] for number in sorted(last)]


def last_reason(study: optuna.Study) -> str:
    """Why the last trial was not completed."""
    reasons = [trial.user_attrs["reason"] for trial in distinct_trials(study) if trial.user_attrs.get("reason")]
    return one_line(reasons[-1], 300) if reasons else "none was started"


def open_study(data: Mapping[str, Any], config: Training, folder: Path, name: str) -> optuna.Study:
    """The study of this file: a new one, or the one that was started with the same space, objectives and other keys."""
    manager, search = config.manager_settings, config.search_settings
    changing = ("manager_settings", "search_settings", config.output_key)
    same = {key: value for key, value in data.items() if key not in changing}
    dumped = search.model_dump(mode="json")
    decided = {"space": dumped["space"], "objectives": dumped["objectives"], "other keys": same}
    prints = {key: provenance.digest(value) for key, value in decided.items()}
    with without_warnings(), translate_storage_errors(storage_name(manager, folder)):
        study: optuna.Study = import_optuna().create_study(
            storage=storage(manager, folder),
            study_name=name,
            directions=[objective.direction for objective in search.objectives],
            pruner=pruner(search),
            load_if_exists=True,
        )
    started = study.user_attrs.get("tokensieve")
    if started is None:
        if any((folder / "trials").glob("*")):
            raise UserError(f"{folder} holds the trials of another study; give another folder with --output")
        study.set_user_attr("tokensieve", prints)
    elif started != prints:
        other = " and ".join(key for key in prints if started.get(key) != prints[key])
        raise UserError(
            f"the study {name!r} was started with another {other}; restore them, or start a new one with --output"
            f"{' and manager_settings.study_name' if manager.storage else ''}"
        )
    seed = [search.seed, len(study.get_trials(deepcopy=False))]  # a continued study does not repeat its draws
    with without_warnings():
        study.sampler = import_optuna().samplers.TPESampler(seed=mixed_seed(seed), constant_liar=True)
    return study


def mixed_seed(seed: Sequence[int]) -> int:
    """One seed made of several numbers."""
    import numpy as np

    return int(np.random.SeedSequence(seed).generate_state(1)[0])


def storage_of(study: optuna.Study) -> Any:
    """The database behind a study (Optuna puts a cache before it)."""
    return getattr(study._storage, "_backend", study._storage)
