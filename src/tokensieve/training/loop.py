"""The loop of every training: steps, evaluations, checkpoints, signals, in one process or several.

<run>/checkpoints/step-00000200/     everything, to resume from there, and trained parts to use; the last two are kept
<run>/checkpoints/<part>_step_200.pt plain state dicts of the same steps, for learners that have `exports`
<run>/checkpoints/best/              the same for the best step by the learner's `monitor`
<run>/logs/                          training.log, log.jsonl, tensorboard/ (log.py)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tokensieve import provenance
from tokensieve.distributed import Processes
from tokensieve.errors import NotFinite, UserError, WriteError, short
from tokensieve.parts.checkpoints import CHECKPOINTS
from tokensieve.training import checkpoint, random_state
from tokensieve.training.log import Log, format_losses
from tokensieve.training.signals import Signals
from tokensieve.training.start import find_checkpoint, processes
from tokensieve.training.tracking import Tracker

Report = Callable[[int, Mapping[str, float]], None]  # the steps done and the numbers of an evaluation


class Learner(Protocol):
    """What the loop drives. `step(i)` draws batch i, trains on it and returns its losses; the rest is its state.

    A learner may also have

        exports() -> dict[str, dict[str, Tensor]]    plain state dicts to write, by the first part of the file's name
        evaluate(done) -> dict[str, float] | None    numbers on the validation split, never on a test split
        monitor: tuple[str, "max" | "min"]           the number that decides which step is the best; for a learner without
                                                     `evaluate` a loss, as its mean between two checkpoints
        tie_breaker: tuple[str, "max" | "min"]       the number of an evaluation that decides between equally good ones
        loss_groups: dict[str, str]                  the group of a loss in the log and the curves, by its name
        describe() -> list[str]                      lines about what is trained, printed and logged at the start
        accelerator: accelerate.Accelerator          if it can run in several processes: all of them call everything, with the
                                                     same names of losses; mixed precision and accumulation belong to `step`

    The loop saves the global generators of torch, numpy and Python of every process; all others are part of the state.
    Evaluations do not change them, so a run ends with the same weights however often it is evaluated.
    """

    def step(self, index: int) -> dict[str, float]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


def train(
    learner: Learner,
    run: Path,
    *,
    steps: int,
    checkpoint_every: int,
    evaluate_every: int | None = None,
    log_every: int = 1,
    resume: bool | int = False,
    keep_checkpoints: int | None = checkpoint.KEPT,
    parts: Callable[[int], Mapping[str, bytes]] | None = None,
    quiet: bool = False,
    report: Report | None = None,
    track: Callable[[], Tracker] | None = None,
) -> dict[str, float] | None:
    """Run `steps` steps, or the rest of them; returns the last evaluation. A resumed run ends with the same bits.

    A learner with `evaluate` is evaluated every `evaluate_every` steps and at the end.
    resume: from the last checkpoint, or from that of a step. keep_checkpoints: how many besides the best; None: all.
    parts: the files of what was learned after so many steps, by name; process 0 writes them into every checkpoint.
    report: called by process 0 with the steps done and the numbers of each evaluation; if it raises, the run ends.
    track: called by process 0 once the run can start; the curves go there too.
    Raises UserError when a loss is not finite, or when the folder has a run and resume is False. On Ctrl-C or SIGTERM it
    writes a checkpoint and exits with 130 or 143.
    """
    progress = _Progress(learner, run, processes(learner), keep_checkpoints, parts)
    start = progress.restore(resume, quiet)
    evaluates = hasattr(learner, "evaluate")
    is_main = progress.processes.is_main
    trackers: list[Tracker] = []  # at most one, of process 0
    if track is not None:
        progress.processes.run_on_main(lambda: trackers.append(track()))
    with (
        Signals(progress.processes) as signals,
        Log(run, start, steps, log_every, quiet, is_main, next(iter(trackers), None)) as log,
    ):
        progress.log = log
        log.write(f"resumed after step {start} from {progress.saved}" if start else f"started, {steps} steps")
        progress.describe(quiet)
        for index in log.indices():
            progress.step(index)
            done = index + 1
            due = done % checkpoint_every == 0 or done == steps
            if evaluates and (done == steps or (evaluate_every and done % evaluate_every == 0)):
                progress.evaluate(report)
            if due and not evaluates:
                progress.keep_if_loss_best()
            stop = max(progress.processes.all_gather(signals.caught))
            if due or stop:
                progress.save()
            if stop:
                log.bar.close()
                progress.print(f"stopped after step {done} of {steps}; checkpoint in {progress.saved}; continue with --resume")
                raise SystemExit(128 + stop)
    return progress.evaluation


class _Progress:
    """The progress of a run: the steps done, the best value, the last evaluation and checkpoint."""

    log: Log

    def __init__(
        self,
        learner: Any,
        run: Path,
        processes: Processes,
        keep: int | None,
        parts: Callable[[int], Mapping[str, bytes]] | None,
    ) -> None:
        self.learner, self.run, self.processes, self.keep, self.parts = learner, run, processes, keep, parts
        self.done = 0
        self.saved: Path | None = None
        self.best: float | None = None
        self.best_tie: float | None = None  # the number of the best step that `tie_breaker` names
        self.recent: list[float] = []  # the loss that `monitor` names, since the last checkpoint
        self.evaluation: dict[str, float] | None = None

    def restore(self, resume: bool | int, quiet: bool) -> int:
        """Restore the checkpoint to resume from, if there is one. Returns the step to start with."""
        saved: checkpoint.Checkpoint | None = self.processes.run_on_main(lambda: find_checkpoint(self.run, resume))
        if saved is None:
            return 0
        try:
            self._restore(saved.state)
        except UserError:
            raise
        except Exception as error:  # whatever learners, optimizers and generators raise for the state of others
            raise UserError(
                f"{saved.folder} is of another training, or of another version ({type(error).__name__}: {short(error, 160)}); "
                "resume it with its own file, or start a new run with another --output"
            ) from error
        self.done, self.saved = saved.step, saved.folder
        if not quiet and self.processes.is_main:
            print(f"resumed after step {saved.step} from {saved.folder}", file=sys.stderr)
        return saved.step

    def _restore(self, state: Mapping[str, Any]) -> None:
        generators = state["generators"]
        if isinstance(generators, dict):  # as runs of one process were saved in 0.1
            generators = [generators]
        if len(generators) != self.processes.size:
            raise UserError(
                f"{self.run} was started with {len(generators)} processes and this is {self.processes.size}; "
                f"resume it with {len(generators)}, or start a new run with another --output"
            )
        self.learner.restore(state["learner"])
        random_state.restore_generators(generators[self.processes.rank])
        progress = state.get("progress", {})
        self.best, self.best_tie = progress.get("best"), progress.get("best_tie")
        self.recent, self.evaluation = progress.get("recent", []), progress.get("evaluation")

    def step(self, index: int) -> None:
        """One step; its losses are averaged over the processes."""
        with self._finite(index):
            losses = self.learner.step(index)
        by_process = self.processes.all_gather(losses)
        for rank, losses in enumerate(by_process):
            if not all(math.isfinite(loss) for loss in losses.values()):
                where = f" in process {rank}" if self.processes.size > 1 else ""
                self.fail(f"step {index}: a loss is not finite{where} ({format_losses(losses)}); {self._advice()}")
        losses = {name: sum(one[name] for one in by_process) / len(by_process) for name in by_process[0]}
        self.done = index + 1
        self.log.losses(self.done, losses, getattr(self.learner, "loss_groups", {}))
        if hasattr(self.learner, "monitor") and not hasattr(self.learner, "evaluate"):
            self.recent.append(losses[self.learner.monitor[0]])

    def evaluate(self, report: Report | None) -> None:
        """Evaluate, keep the step if it is the best, and report. The generators stay as they were."""
        generators = random_state.generators()
        with self._finite(self.done):
            measured = self.learner.evaluate(self.done)
        numbers = provenance.to_json_value(self.processes.broadcast(measured))
        random_state.restore_generators(generators)
        if numbers is None:
            return
        self.evaluation = numbers
        self.log.evaluation(self.done, numbers)
        if hasattr(self.learner, "monitor"):
            tie = numbers.get(self.learner.tie_breaker[0]) if hasattr(self.learner, "tie_breaker") else None
            self.keep_if_best(numbers[self.learner.monitor[0]], tie)
        if report is not None:
            self.processes.run_on_main(lambda: report(self.done, numbers))

    def keep_if_loss_best(self) -> None:
        """For learners without evaluation: the mean of a loss since the last checkpoint decides."""
        if self.recent:
            self.keep_if_best(sum(self.recent) / len(self.recent))
            self.recent = []

    def keep_if_best(self, value: float | None, tie: float | None = None) -> None:
        """Keep this step as the best if it is better than all before. tie: what decides between equal values."""
        name, direction = self.learner.monitor
        if value is None:
            return
        if value == self.best:
            if tie is None or self.best_tie is None or not _is_better(tie, self.best_tie, self.learner.tie_breaker[1]):
                return
        elif self.best is not None and not _is_better(value, self.best, direction):
            return
        self.best, self.best_tie = value, tie
        self.log.write(f"the best {name} so far, {value:.6g}: kept in {self._write(checkpoint.save_best)}")

    def save(self) -> None:
        self.saved = self._write(partial(checkpoint.save, keep=self.keep))
        self.log.write(f"checkpoint in {self.saved}")

    def _write(self, save: Callable[..., Path]) -> Path:
        exports = self.learner.exports() if hasattr(self.learner, "exports") else None
        state = {
            "learner": self.learner.state(),
            "generators": self.processes.all_gather(random_state.generators()),
            "progress": {
                "best": self.best,
                "best_tie": self.best_tie,
                "recent": self.recent,
                "evaluation": self.evaluation,
            },
        }

        def write() -> Path:
            try:
                parts = None if self.parts is None else self.parts(self.done)
                return save(self.run / CHECKPOINTS, self.done, state, exports, parts)
            except OSError as error:
                before = f"the one before, {self.saved}, is intact" if self.saved else "there is none before"
                raise WriteError(
                    f"step {self.done}: no checkpoint could be written to {self.run} ({error}); {before}: "
                    "free disk space and continue with --resume"
                ) from error
            except FloatingPointError as error:
                raise UserError(f"{error}; the last good one is {self.saved}; try a lower learning rate") from error

        return self.processes.run_on_main(write)

    def describe(self, quiet: bool) -> None:
        """Log, and print unless quiet, what the learner says of itself."""
        for line in self.learner.describe() if hasattr(self.learner, "describe") else ():
            self.log.write(line)
            if not quiet and self.processes.is_main:
                print(line, file=sys.stderr)

    def print(self, text: str) -> None:
        """Write a line to training.log and to stderr."""
        self.log.write(text)
        if self.processes.is_main:
            print(text, file=sys.stderr)

    @contextmanager
    def _finite(self, index: int) -> Iterator[None]:
        """Report NaN that a model finds itself like a loss that is not finite."""
        try:
            yield
        except NotFinite as error:
            self.fail(f"step {index}: {error}; {self._advice()}")

    def _advice(self) -> str:
        good = f"the last good checkpoint is {self.saved}" if self.saved else "there was no checkpoint yet"
        return f"{good}; try a lower learning rate"

    def fail(self, text: str) -> NoReturn:
        self.log.write(text)
        raise UserError(text)


def _is_better(value: float, best: float, direction: str) -> bool:
    return value > best if direction == "max" else value < best
