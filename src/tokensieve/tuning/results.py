"""What a search found: `tune.json`, the table of the front and of the controls, and the best plan as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokensieve import files, provenance
from tokensieve.measuring import terminal
from tokensieve.plan.file import KEY
from tokensieve.tasks.fidelity.measures import mean_and_stderr, paired_difference
from tokensieve.tuning.front import choose, pareto
from tokensieve.tuning.study import Measured, Trial

FORMAT = "tokensieve tune 1"
RESULT, PLOT = "tune.json", "tune.png"


@dataclass
class Found:
    """The result of a search, finished or not."""

    trials: list[Trial]
    rows: list[Measured]
    target: float | None  # speed-up
    distance: str  # the name of the distance
    unit: str
    about: Mapping[str, Any]  # model, images and settings, for the file
    title: str
    notes: list[str]

    @property
    def front(self) -> list[Measured]:
        """The Pareto front of the measured plans, controls included, the slowest first."""
        return pareto(self.rows, mean_distance, lambda row: row.speedup)

    @property
    def best(self) -> Measured | None:
        """The best plan that reaches the target, controls included: if one of them is best, that is the answer."""
        return choose(self.rows, mean_distance, lambda row: row.speedup, self.target)

    @property
    def plan(self) -> str | None:
        """The best plan: measured, or of a search that was stopped before, by prediction; None if there is none."""
        if self.rows:
            best = self.best or max(self.rows, key=lambda row: row.speedup)
            return best.plan
        predicted = choose(self.trials, lambda row: row.distance, lambda row: row.speedup, self.target)
        return None if predicted is None else predicted.plan

    def to_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "format": FORMAT,
            KEY: self.plan,
            "is_measured": bool(self.rows),
            "reaches_target": best is not None,
            **self.about,
            "distance": self.distance,
            "front": [row.plan for row in self.front],
            "measured": [_summary(row, best) for row in self.rows],
            "trials": [vars(trial) for trial in self.trials],
            "notes": self.notes,
            "versions": provenance.versions(),
        }


def mean_distance(row: Measured) -> float:
    """The mean of the first measure."""
    return mean_and_stderr(torch.tensor(next(iter(row.values.values()))))[0]


def difference(row: Measured, best: Measured) -> tuple[float, float]:
    """How much farther from the full model a row is than the best one, image by image, and the standard error."""
    return paired_difference(*(torch.tensor(next(iter(each.values.values()))) for each in (row, best)))


def _summary(row: Measured, best: Measured | None) -> dict[str, Any]:
    numbers = {key: value for key, value in vars(row).items() if key not in ("values", "candidate")}
    for name, values in row.values.items():
        numbers[name], numbers[f"{name}_stderr"] = mean_and_stderr(torch.tensor(values))
    if best is not None:
        numbers["more_than_best"], numbers["more_than_best_stderr"] = difference(row, best)
    return numbers


def write(found: Found, folder: Path) -> Path:
    """Writes the result and its plot; the result file."""
    from tokensieve.tuning import plot

    path = folder / RESULT
    files.write_json(path, found.to_json())
    if found.trials or found.rows:
        files.write_bytes(folder / PLOT, plot.draw(found))
    return path


def show(found: Found, path: Path) -> None:
    """Prints the table, the notes, the best plan and how to use it."""
    if found.rows:
        terminal.print_table(_table(found))
    for note in found.notes:
        print(f"note: {note}")
    print(_verdict(found, path))


def _table(found: Found) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    best, front = found.best, found.front
    table = Table(title=found.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("plan", overflow="fold", min_width=18)
    others = list(found.rows[0].values)[1:]
    heads = [found.distance.replace(" div", "\ndiv"), "more than\nbest", *(name.replace("_", "\n") for name in others)]
    heads += ["speed\n-up", "oracle", "tokens"]
    for name in (*heads, "GFLOPs"):
        table.add_column(name, justify="right", no_wrap=True)
    controls = [row for row in found.rows if row.role == "control"]
    for title, rows in (("Pareto front", front), ("controls", controls)):
        if rows:
            table.add_section()
            table.add_row(title, style="dim")
        for row in rows:
            table.add_row(*_cells(row, best, others), style="bold" if row is best else None)
    return table


def _cells(row: Measured, best: Measured | None, others: Sequence[str]) -> list[str]:
    mean, stderr = mean_and_stderr(torch.tensor(next(iter(row.values.values()))))
    more = ""
    if best is not None and row is not best:
        more = "{:+.3f}±{:.3f}".format(*difference(row, best))
    return [
        row.plan,
        f"{mean:.4f}±{stderr:.4f}",
        "best" if row is best else more,
        *(f"{mean_and_stderr(torch.tensor(row.values[name]))[0]:.3f}" for name in others),
        f"{row.speedup:.2f}x",
        f"{row.speedup_oracle:.2f}x",
        str(row.tokens),
        f"{row.gflops:.3g}",
    ]


def _verdict(found: Found, path: Path) -> str:
    if found.plan is None:
        return f"no plan was found so far; see {path}"
    lines = []
    if not found.rows:
        lines.append("no plan was measured yet; this one is the best by prediction")
    elif found.best is None:
        fastest = max(found.rows, key=lambda row: row.speedup)
        lines.append(f"no measured plan reaches {found.target:g}x; the fastest ({fastest.speedup:.2f}x) is given")
    lines.append(f"best plan: {found.plan}")
    lines.append(f'use it:    tokensieve.apply(model, "{found.plan}")   or   --plan @{path} in eval, bench and show')
    return "\n".join(lines)
