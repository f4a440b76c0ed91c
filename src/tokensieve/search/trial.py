"""One trial of a search: a process that trains the trial's config.yaml and writes how it ended to outcome.json.

Started by workers.py, through torchrun where a trial has several GPUs. Only process 0 talks to Optuna: it reports every
evaluation, and stops the training if Optuna prunes the trial. A process that is killed, or cannot write, leaves no
outcome.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tokensieve import training
from tokensieve.config import load
from tokensieve.errors import ProcessLostError, UserError, WriteError, one_line
from tokensieve.plugins import load_plugin
from tokensieve.search import space
from tokensieve.search.study import OWNER, import_optuna, pruner, storage, without_warnings
from tokensieve.training.tracking import PROJECT, PROJECT_GROUP

PRUNED = "pruned: "  # prefix of the UserError that stops a pruned trial
CANNOT_WRITE = os.EX_IOERR if hasattr(os, "EX_IOERR") else 74  # exit code of a trial that the disk has no room for


def main(argv: Sequence[str]) -> int:
    """argv: the snapshot of the search's file, the trial's folder, its id in the database, and files of plug-ins."""
    snapshot, folder, trial_id = Path(argv[0]), Path(argv[1]), int(argv[2])
    signal.signal(signal.SIGTERM, _exit)  # the search stops; the training itself saves a checkpoint first
    for plugin in argv[3:]:
        load_plugin(plugin)
    threading.Thread(target=_exit_with, args=(os.getppid(), int(os.environ[OWNER])), daemon=True).start()
    is_main = os.environ.get("RANK", "0") == "0"
    report = reporter(snapshot, trial_id) if is_main else _ignore
    try:
        tracking: dict[str, Any] = {}
        if PROJECT in os.environ:
            tracking = {"wandb": os.environ[PROJECT], "group": os.environ.get(PROJECT_GROUP)}
        training.run(folder / "config.yaml", resume=True, output=folder, quiet=True, report=report, **tracking)
    except ProcessLostError as error:  # the process that ended first has written why, or was killed
        print(error, file=sys.stderr)
        return 1
    except (SystemExit, KeyboardInterrupt) as error:
        return _write_outcome(folder, "interrupted", "", int(getattr(error, "code", 130)))
    except WriteError as error:
        print(one_line(error), file=sys.stderr)
        return CANNOT_WRITE
    except Exception as error:
        if isinstance(error, UserError) and str(error).startswith(PRUNED):
            return _write_outcome(folder, "pruned", str(error).removeprefix(PRUNED), 0)
        traceback.print_exc()
        reason = str(error) if isinstance(error, UserError) else one_line(f"{type(error).__name__}: {error}")
        return _write_outcome(folder, "failed", reason, 1)
    return _write_outcome(folder, "complete", "", 0) if is_main else 0


def reporter(snapshot: Path, trial_id: int) -> Callable[[int, Mapping[str, float]], None]:
    """A function that reports each evaluation to Optuna, and stops the training if Optuna prunes the trial."""
    config = load(snapshot)
    manager, settings = config.manager_settings, config.search_settings
    if settings.pruner == "none" or len(settings.objectives) > 1:  # Optuna prunes by a single number
        return _ignore
    optuna, name = import_optuna(), settings.objectives[0].name
    with without_warnings():
        study = optuna.load_study(
            study_name=manager.study_name,
            storage=storage(manager, snapshot.parent),
            sampler=optuna.samplers.RandomSampler(),  # all values of the trial are drawn already
            pruner=pruner(settings),
        )
        trial = optuna.trial.Trial(study, trial_id)

    def report(step: int, numbers: Mapping[str, float]) -> None:
        value = space.numbers(numbers).get(name)
        if value is None:
            return
        try:
            with without_warnings():
                trial.report(value, step)
                behind = trial.should_prune()
        except Exception as error:  # SQLAlchemy, the driver and Optuna each have their own; a UserError reaches all processes
            reason = one_line(error, 300)
            raise UserError(f"step {step}: {name} could not be written to the study's database ({reason})") from error
        if behind:
            raise UserError(f"{PRUNED}{name} {value:.6g} after step {step} is behind other trials")

    return report


def _ignore(step: int, numbers: Mapping[str, float]) -> None:
    """No report: Optuna does not prune, or this is not process 0."""


def _write_outcome(folder: Path, state: str, reason: str, code: int) -> int:
    """Write how the trial ended, unless another process of the trial has done so."""
    try:
        with (folder / "outcome.json").open("x", encoding="utf-8") as file:
            json.dump({"state": state, "reason": reason}, file)
    except FileExistsError:
        pass
    except OSError as error:
        (folder / "outcome.json").unlink(missing_ok=True)
        print(f"cannot write {folder / 'outcome.json'}: {error.strerror}", file=sys.stderr)
        return CANNOT_WRITE
    return code


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _exit_with(parent: int, owner: int) -> None:
    """Exit when the parent process or the search is gone, so that no trial is trained twice at the same time."""
    while os.getppid() == parent and _lives(owner):
        time.sleep(1)
    os._exit(1)


def _lives(process: int) -> bool:
    """Whether a process is alive; a zombie is not."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a system that has no /proc
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
