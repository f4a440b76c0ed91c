"""One loop for every training: steps, a log of losses, checkpoints, signals. What is learned is the learner's affair."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from tqdm import tqdm

from tokensieve.errors import UserError
from tokensieve.training import checkpoint

LOG = "log.jsonl"


class Learner(Protocol):
    """What the loop drives. `step(i)` draws batch i, learns from it and returns its losses; the rest is its state."""

    def step(self, index: int) -> dict[str, float]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


class _Signals:
    """Notes the first Ctrl-C or SIGTERM, so that the step in hand is finished and saved; a second one exits at once."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.caught is not None:
            os._exit(128 + number)
        self.caught = number

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(learner: Learner, run: Path, *, steps: int, checkpoint_every: int, resume: bool = False, quiet: bool = False) -> None:
    """Do `steps` steps, or the rest of them. A run that was stopped and resumed ends with the same bits.

    Raises UserError when a loss is not finite, or when there is a run and no wish to resume it; exits with 130 or 143,
    after a checkpoint, when it is told to stop.
    """
    start = _begin(learner, run, resume, quiet)
    with _Signals() as signals, (run / LOG).open("a", buffering=1, encoding="utf-8") as log:
        bar = tqdm(range(start, steps), initial=start, total=steps, disable=quiet, unit="step", dynamic_ncols=True)
        for index in bar:
            losses = learner.step(index)
            if not all(math.isfinite(loss) for loss in losses.values()):
                raise UserError(
                    f"step {index}: a loss is not finite ({_told(losses)}); "
                    f"the checkpoints in {run} are from before; begin a new run with a lower learning rate"
                )
            log.write(json.dumps({"step": index} | {name: round(loss, 6) for name, loss in losses.items()}) + "\n")
            bar.set_postfix_str(_told(losses), refresh=False)
            done, stop = index + 1, signals.caught
            if done % checkpoint_every == 0 or done == steps or stop is not None:
                folder = _save(learner, run, done)
            if stop is not None:
                bar.close()
                print(f"stopped after step {done} of {steps}; checkpoint in {folder}; continue with --resume", file=sys.stderr)
                raise SystemExit(128 + stop)


def _save(learner: Learner, run: Path, done: int) -> Path:
    try:
        return checkpoint.save(run, done, {"learner": learner.state(), "generators": checkpoint.generators()})
    except OSError as error:
        raise UserError(
            f"step {done}: no checkpoint could be written to {run} ({error}); the one before is intact: "
            "make room and continue with --resume"
        ) from error
    except FloatingPointError as error:
        raise UserError(f"{error}; begin a new run with a lower learning rate") from error


def _begin(learner: Learner, run: Path, resume: bool, quiet: bool) -> int:
    """Restore the newest good checkpoint, if that is wanted and there is one. Returns the step to begin with."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / LOG).touch()
    except OSError as error:
        raise UserError(f"{str(run)!r} cannot be written to ({error.strerror}); give another folder with --output") from None
    found, broken = checkpoint.latest(run)
    if not resume:
        if found or broken:
            raise UserError(f"{run} holds a run already; add --resume to continue it, or give another folder with --output")
        (run / LOG).write_text("", encoding="utf-8")
        return 0
    for harm in broken:
        print(f"passed over a broken checkpoint: {harm}", file=sys.stderr)
    if found is None:
        if broken:
            raise UserError(f"no whole checkpoint in {run}; start again with another folder (--output)")
        (run / LOG).write_text("", encoding="utf-8")
        return 0
    learner.restore(found.state["learner"])
    checkpoint.restore_generators(found.state["generators"])
    rows = [row for row in (run / LOG).read_text(encoding="utf-8").splitlines() if _is_before(row, found.step)]
    (run / LOG).write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    if not quiet:
        print(f"resumed after step {found.step} from {found.folder}", file=sys.stderr)
    return found.step


def _is_before(row: str, step: int) -> bool:
    """Whether a log row is of a step that the checkpoint knows; a row torn by a kill is not."""
    try:
        return json.loads(row)["step"] < step
    except ValueError:
        return False


def _told(losses: dict[str, float]) -> str:
    return " ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
