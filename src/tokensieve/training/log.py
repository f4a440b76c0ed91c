"""Logs of a run: a progress bar, training.log for readers, log.jsonl for programs, curves for TensorBoard and W&B.

A row of log.jsonl is {"step": 17, "loss": 0.3} for the losses of step 17, counted from 0, or {"step": 199, "evaluation": {...}}
for the evaluation after step 199. Everywhere else a step is the number of steps done, as in the checkpoints' names.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tokensieve import files, provenance
from tokensieve.errors import WriteError
from tokensieve.installation.packages import naming_extras
from tokensieve.terminal import progress
from tokensieve.training.tracking import Tracker

FOLDER = "logs"
ROWS, TEXT, CURVES = "log.jsonl", "training.log", "tensorboard"


def _hide_writer_errors(show: Callable[[Any], object], error: Any) -> None:
    """Shows an error of a thread, but not one of TensorBoard's writer, such as a full disk: the next curve raises it."""
    if not (isinstance(error.exc_value, OSError) and type(error.thread).__module__.startswith("tensorboard.")):
        show(error)


class Log:
    """The log of a run from step `start` on. Only the main process writes."""

    def __init__(
        self, run: Path, start: int, steps: int, every: int, quiet: bool, is_main: bool, tracker: Tracker | None = None
    ) -> None:
        self.folder, self.start, self.steps, self.every = run / FOLDER, start, steps, every
        self.quiet, self.is_main, self.tracker = quiet, is_main, tracker

    def __enter__(self) -> Log:
        if not self.is_main:
            return self
        with naming_extras():
            from torch.utils.tensorboard import SummaryWriter

        self.show_error = threading.excepthook
        threading.excepthook = partial(_hide_writer_errors, self.show_error)
        with self._translate_errors():
            self.rows = (self.folder / ROWS).open("a", buffering=1, encoding="utf-8")
            self.text = (self.folder / TEXT).open("a", buffering=1, encoding="utf-8")
            # hides what an earlier process logged after the checkpoint, so that the curves continue
            purge = self.start + 1 if self.start else None
            self.curves = SummaryWriter(str(self.folder / CURVES), purge_step=purge)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.is_main:
            with self._translate_errors() if kind is None else suppress(OSError):  # the first error is the one to report
                self.rows.close()
                self.text.close()
                self.curves.close()
            threading.excepthook = self.show_error
            if self.tracker is not None:
                self.tracker.close(failed=kind is not None)

    def indices(self) -> Iterable[int]:
        """The indices of the steps, with a progress bar."""
        hidden, steps = self.quiet or not self.is_main, range(self.start, self.steps)
        self.bar = progress.bar(steps, quiet=hidden, initial=self.start, total=self.steps, unit="step")
        return self.bar

    def losses(self, done: int, losses: Mapping[str, float], groups: Mapping[str, str]) -> None:
        """groups: the group of a loss by its name; those of no group come first, and are curves of the group train."""
        self.bar.set_postfix_str(format_losses(losses), refresh=False)
        if not self.is_main or (done % self.every and done != self.steps):
            return
        with self._translate_errors():
            self._row({"step": done - 1} | {name: round(loss, 6) for name, loss in losses.items()})
            grouped = {group: {name: x for name, x in losses.items() if groups.get(name) == group} for group in groups.values()}
            others = {name: loss for name, loss in losses.items() if name not in groups}
            lines = [f"step {done}/{self.steps}  {format_losses(others, 5)}".rstrip()]
            for group, members in grouped.items():
                lines += [f"  {group}:"] * bool(members) + [f"    - {name}: {loss:.5f}" for name, loss in members.items()]
                self._draw(group, done, members)
            self._line("\n".join(lines))
            self._draw("train", done, others)

    def evaluation(self, done: int, numbers: Mapping[str, Any]) -> None:
        if not self.is_main:
            return
        width = max(map(len, numbers), default=0)
        with self._translate_errors():
            self._row({"step": done - 1, "evaluation": provenance.to_json_value(numbers)})
            rows = "".join(f"\n    {name:<{width}}  {_short(value)}" for name, value in numbers.items())
            self._line(f"evaluation after step {done}{rows}")
            self._draw("evaluation", done, numbers)
            self.curves.flush()

    def write(self, text: str) -> None:
        """Write a line to training.log."""
        if self.is_main:
            with self._translate_errors():
                self._line(text)

    def _row(self, row: Mapping[str, Any]) -> None:
        self.rows.write(json.dumps(row) + "\n")

    def _line(self, text: str) -> None:
        self.text.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def _draw(self, group: str, done: int, numbers: Mapping[str, Any]) -> None:
        curves = {f"{group}/{name}": value for name, value in numbers.items() if isinstance(value, (int, float))}
        for name, value in curves.items():
            self.curves.add_scalar(name, value, done)
        if self.tracker is not None and curves:
            self.tracker.log(done, curves)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(
                f"{self.folder} cannot be written to ({error.strerror or error}); the last checkpoint is intact: "
                "free disk space and continue with --resume"
            ) from error


def format_losses(losses: Mapping[str, float], digits: int = 3) -> str:
    return " ".join(f"{name} {loss:.{digits}f}" for name, loss in losses.items())


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def truncate_log(run: Path, step: int) -> None:
    """Remove the rows of log.jsonl from a step on, which will be run again, and rows that a kill left incomplete."""
    path = run / FOLDER / ROWS
    rows = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    files.write_text(path, "".join(row + "\n" for row in rows if _is_before(row, step)))


def _is_before(row: str, step: int) -> bool:
    try:
        return bool(json.loads(row)["step"] < step)
    except (ValueError, TypeError, LookupError, RecursionError):  # not a row of ours
        return False


# ------------------------------------------------------------------------------------------------------ after the last step


def loss_curve(run: Path) -> list[dict[str, float]]:
    """The losses of the log in a hundred rows, written to the run's folder as losses.csv."""
    rows = [json.loads(row) for row in (run / FOLDER / ROWS).read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "evaluation" not in row]
    curve = thinned(rows, every=max(1, len(rows) // 100))
    names = list(dict.fromkeys(name for row in curve for name in row))
    table = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in curve)]
    files.write_text(run / "losses.csv", "\n".join(table) + "\n")
    return curve


def thinned(rows: list[dict[str, float]], every: int) -> list[dict[str, float]]:
    """Means over every `every` rows; each has the step it ends with."""
    out = []
    for start in range(0, len(rows), every):
        chunk = rows[start : start + every]
        names = dict.fromkeys(name for row in chunk for name in row if name != "step")
        means = {name: round(_mean(row[name] for row in chunk if name in row), 4) for name in names}
        out.append({"step": chunk[-1]["step"]} | means)
    return out


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
