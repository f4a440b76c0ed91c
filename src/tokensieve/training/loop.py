"""One loop for every training: steps, evaluations, checkpoints, signals, in one process or several. What is learned is the
learner's affair.

    <run>/checkpoints/step-00000200/     everything, to go on from there; the last two are kept (checkpoint.py)
    <run>/checkpoints/<part>_step_200.pt plain state dicts of the same steps, of learners that have `exports`
    <run>/checkpoints/best/              the same of the step that was best by the learner's own measure
    <run>/logs/                          training.log, log.jsonl, tensorboard/ (log.py)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tokensieve import provenance
from tokensieve.distributed import Processes
from tokensieve.errors import NotFinite, UserError
from tokensieve.training import checkpoint, random_state
from tokensieve.training.log import Log, format_losses
from tokensieve.training.signals import Signals
from tokensieve.training.start import CHECKPOINTS, find_checkpoint, processes

Report = Callable[[int, Mapping[str, float]], None]  # the steps done and the numbers of an evaluation


class Learner(Protocol):
    """What the loop drives. `step(i)` draws batch i, learns from it and returns its losses; the rest is its state.

    A learner may also have

        exports() -> dict[str, dict[str, Tensor]]    plain state dicts to write, by the first part of the file's name
        evaluate(done) -> dict[str, float] | None    numbers on the validation split, never on a test split
        monitor: tuple[str, "max" | "min"]            which of these numbers makes a step the best; of a learner that has no
                                                     `evaluate`: which loss, as its mean between two checkpoints
        accelerator: accelerate.Accelerator          if it can run in several processes: all of them call everything, with the
                                                     same names of losses; mixed precision and accumulation are within `step`

    The global generators of torch, numpy and Python are the loop's to save, those of every process; all others are state.
    Evaluating does not move them, so a run ends with the same weights however often it is evaluated.
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
    resume: bool = False,
    quiet: bool = False,
    report: Report | None = None,
) -> dict[str, float] | None:
    """Do `steps` steps, or the rest of them; the last evaluation. A run that was stopped and resumed ends with the same bits.

    A learner that can be evaluated is so every `evaluate_every` steps and at the end.
    report: called by process 0 with the steps done and the numbers after each evaluation; if it raises, the run ends.
    Raises UserError when a loss is not finite, or when there is a run and no wish to resume it; exits with 130 or 143,
    after a checkpoint, when it is told to stop.
    """
    progress = _Progress(learner, run, processes(learner))
    start = progress.begin(resume, quiet)
    evaluates = hasattr(learner, "evaluate")
    with Signals(progress.world) as signals, Log(run, start, steps, log_every, quiet, progress.world.is_main) as log:
        progress.log = log
        log.say(f"resumed after step {start} from {progress.saved}" if start else f"begun, {steps} steps to do")
        for index in log.indices():
            progress.learn(index)
            done = index + 1
            due = done % checkpoint_every == 0 or done == steps
            if evaluates and (done == steps or (evaluate_every and done % evaluate_every == 0)):
                progress.evaluate(report)
            if due and not evaluates:
                progress.judge_by_loss()
            stop = max(progress.world.all_gather(signals.caught))
            if due or stop:
                progress.save()
            if stop:
                log.bar.close()
                progress.tell(f"stopped after step {done} of {steps}; checkpoint in {progress.saved}; continue with --resume")
                raise SystemExit(128 + stop)
    return progress.evaluation


class _Progress:
    """A run on its way: what has been done, how good it was, and what of it is on the disk."""

    log: Log

    def __init__(self, learner: Any, run: Path, world: Processes) -> None:
        self.learner, self.run, self.world = learner, run, world
        self.done = 0
        self.saved: Path | None = None
        self.best: float | None = None
        self.recent: list[float] = []  # the loss that `monitor` names, since it was last judged
        self.evaluation: dict[str, float] | None = None

    def begin(self, resume: bool, quiet: bool) -> int:
        """Restore the newest good checkpoint, if that is wanted and there is one. Returns the step to begin with."""
        found: checkpoint.Checkpoint | None = self.world.run_on_main(lambda: find_checkpoint(self.run, resume))
        if found is None:
            return 0
        generators = found.state["generators"]
        if isinstance(generators, dict):  # as runs of one process were saved in 0.1
            generators = [generators]
        if len(generators) != self.world.size:
            raise UserError(
                f"{self.run} was begun with {len(generators)} processes and this is {self.world.size}; "
                f"resume it with {len(generators)}, or begin a new run with another --output"
            )
        self.learner.restore(found.state["learner"])
        random_state.restore_generators(generators[self.world.rank])
        self.done, self.saved = found.step, found.folder
        for name, value in found.state.get("progress", {}).items():
            setattr(self, name, value)
        if not quiet and self.world.is_main:
            print(f"resumed after step {found.step} from {found.folder}", file=sys.stderr)
        return found.step

    def learn(self, index: int) -> None:
        """One step, and its losses: their means over the processes."""
        with self._finite(index):
            losses = self.learner.step(index)
        told_by = self.world.all_gather(losses)
        for rank, losses in enumerate(told_by):
            if not all(math.isfinite(loss) for loss in losses.values()):
                where = f" in process {rank}" if self.world.size > 1 else ""
                self.fail(f"step {index}: a loss is not finite{where} ({format_losses(losses)}); {self._advice()}")
        losses = {name: sum(one[name] for one in told_by) / len(told_by) for name in told_by[0]}
        self.done = index + 1
        self.log.losses(self.done, losses)
        if hasattr(self.learner, "monitor") and not hasattr(self.learner, "evaluate"):
            self.recent.append(losses[self.learner.monitor[0]])

    def evaluate(self, report: Report | None) -> None:
        """Measure, keep it if it is the best, tell. The generators are afterwards as they were."""
        generators = random_state.generators()
        with self._finite(self.done):
            measured = self.learner.evaluate(self.done)
        numbers = provenance.to_json_value(self.world.broadcast(measured))
        random_state.restore_generators(generators)
        if numbers is None:
            return
        self.evaluation = numbers
        self.log.evaluation(self.done, numbers)
        if hasattr(self.learner, "monitor"):
            self.judge(numbers[self.learner.monitor[0]])
        if report is not None:
            self.world.run_on_main(lambda: report(self.done, numbers))

    def judge_by_loss(self) -> None:
        """Without an evaluation: the mean of a loss since the last time decides."""
        if self.recent:
            self.judge(sum(self.recent) / len(self.recent))
            self.recent = []

    def judge(self, value: float | None) -> None:
        """Keep this step if it is better than all before."""
        name, direction = self.learner.monitor
        if value is None or (self.best is not None and (value <= self.best if direction == "max" else value >= self.best)):
            return
        self.best = value
        self.log.say(f"the best {name} so far, {value:.6g}: kept in {self._write(checkpoint.save_best)}")

    def save(self) -> None:
        self.saved = self._write(checkpoint.save)
        self.log.say(f"checkpoint in {self.saved}")

    def _write(self, save: Callable[..., Path]) -> Path:
        exports = self.learner.exports() if hasattr(self.learner, "exports") else None
        state = {
            "learner": self.learner.state(),
            "generators": self.world.all_gather(random_state.generators()),
            "progress": {"best": self.best, "recent": self.recent, "evaluation": self.evaluation},
        }

        def write() -> Path:
            try:
                return save(self.run / CHECKPOINTS, self.done, state, exports)
            except OSError as error:
                before = f"the one before, {self.saved}, is intact" if self.saved else "there is none before"
                raise UserError(
                    f"step {self.done}: no checkpoint could be written to {self.run} ({error}); {before}: "
                    "make room and continue with --resume"
                ) from error
            except FloatingPointError as error:
                raise UserError(f"{error}; the last good one is {self.saved}; try a lower learning rate") from error

        return self.world.run_on_main(write)

    def tell(self, text: str) -> None:
        """In training.log and on stderr."""
        self.log.say(text)
        if self.world.is_main:
            print(text, file=sys.stderr)

    @contextmanager
    def _finite(self, index: int) -> Iterator[None]:
        """Where a model finds NaN itself, before there is any loss, say what is said of a loss."""
        try:
            yield
        except NotFinite as error:
            self.fail(f"step {index}: {error}; {self._advice()}")

    def _advice(self) -> str:
        good = f"the last good checkpoint is {self.saved}" if self.saved else "there was no checkpoint yet"
        return f"{good}; try a lower learning rate"

    def fail(self, text: str) -> NoReturn:
        self.log.say(text)
        raise UserError(text)
