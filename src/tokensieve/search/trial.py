"""One trial of a search: a process of its own that trains what the trial's config.yaml says and tells how it ended.

Started by search.py, by torchrun where a trial has several GPUs. Only process 0 talks to Optuna: it reports what was measured
on the way, and ends the training if Optuna finds it not worth finishing. outcome.json says how it ended; a process that is
killed leaves none, which is how the search knows.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokensieve import training
from tokensieve.config import load
from tokensieve.errors import ProcessLostError, UserError, one_line
from tokensieve.search import space
from tokensieve.search.study import OWNER, import_optuna, pruner, storage, without_warnings

PRUNED = "pruned: "  # how the message of a UserError begins that ends a trial which is not worth finishing


def main(argv: Sequence[str]) -> int:
    snapshot, folder, trial_id = Path(argv[0]), Path(argv[1]), int(argv[2])
    threading.Thread(target=_end_with, args=(os.getppid(), int(os.environ[OWNER])), daemon=True).start()
    leads = os.environ.get("RANK", "0") == "0"
    report = reporter(snapshot, trial_id) if leads else _listen
    try:
        training.run(folder / "config.yaml", resume=True, output=folder, quiet=True, report=report)
    except ProcessLostError as error:  # the process that ended first has told why, or was killed
        print(error, file=sys.stderr)
        return 1
    except (SystemExit, KeyboardInterrupt) as error:
        return _tell(folder, "interrupted", "", int(getattr(error, "code", 130)))
    except Exception as error:
        if isinstance(error, UserError) and str(error).startswith(PRUNED):
            return _tell(folder, "pruned", str(error).removeprefix(PRUNED), 0)
        traceback.print_exc()
        told = str(error) if isinstance(error, UserError) else " ".join(f"{type(error).__name__}: {error}".split())
        return _tell(folder, "failed", told, 1)
    return _tell(folder, "complete", "", 0) if leads else 0


def reporter(snapshot: Path, trial_id: int) -> Callable[[int, Mapping[str, float]], None]:
    """What hands the numbers of each evaluation to Optuna, and ends the training if it has seen enough."""
    config = load(snapshot)
    manager, settings = config.manager_settings, config.search_settings
    if settings.pruner == "none" or len(settings.objectives) > 1:  # Optuna prunes by a single number
        return _listen
    optuna, name = import_optuna(), settings.objectives[0].name
    with without_warnings():
        study = optuna.load_study(
            study_name=manager.study_name,
            storage=storage(manager.storage),
            sampler=optuna.samplers.RandomSampler(),  # all values of the trial are chosen
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
        except Exception as error:  # SQLAlchemy, the driver and Optuna each have their own; all processes must hear of it
            told = one_line(error)
            raise UserError(f"step {step}: the study's database could not be told {name} ({told[:300]})") from error
        if behind:
            raise UserError(f"{PRUNED}{name} {value:.6g} after step {step} is behind other trials")

    return report


def _listen(step: int, numbers: Mapping[str, float]) -> None:
    """Nothing to say."""


def _tell(folder: Path, state: str, reason: str, code: int) -> int:
    """Leave word of the end, unless another process of the trial did."""
    try:
        with (folder / "outcome.json").open("x", encoding="utf-8") as file:
            json.dump({"state": state, "reason": reason}, file)
    except FileExistsError:
        pass
    return code


def _end_with(parent: int, owner: int) -> None:
    """End when the process that started this one, or the search, is gone, so that no trial is trained twice at a time."""
    while os.getppid() == parent and _lives(owner):
        time.sleep(1)
    os._exit(1)


def _lives(process: int) -> bool:
    """Whether a process is there; one that is dead but not collected yet (a zombie) is not."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a system that has no /proc
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
