"""The plot of a search: the distance to the full model over the speed-up, with the front, the controls and the best plan."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from tokensieve.tasks.fidelity.measures import mean_and_stderr

if TYPE_CHECKING:
    from tokensieve.tuning.results import Found
    from tokensieve.tuning.study import Measured

BLUE, ORANGE, GREEN, GREY, LIGHT = "#2563a8", "#d9730d", "#3f7f3f", "#8a8f98", "#c9ccd2"
MARKERS = {"resize": "s", "random": "^", "grid": "D"}


def draw(found: Found) -> bytes:
    """The plot as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    figure = Figure(figsize=(8.2, 5.4), dpi=130, layout="constrained")
    axis = figure.add_subplot()
    _draw_points(axis, found)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(FuncFormatter(_minor) if _decades(axis) < 2.5 else NullFormatter())
    axis.xaxis.set_major_locator(MaxNLocator(7))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.grid(True, which="major", color="#eceef1", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("speed-up over the full model (measured; small grey points: predicted)")
    axis.set_ylabel(f"{found.distance} to the full model (mean over {found.unit}s)")
    axis.set_title(found.title, fontsize=10, loc="left")
    axis.legend(fontsize=8, loc="best", framealpha=0.85, edgecolor="white")
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


def _draw_points(axis: Any, found: Found) -> None:
    trials = [trial for trial in found.trials if trial.distance > 0]
    axis.plot(
        [trial.speedup for trial in trials],
        [trial.distance for trial in trials],
        "o",
        markersize=3,
        color=LIGHT,
        label=f"tried on a few {found.unit}s",
    )
    if found.target is not None:
        axis.axvline(found.target, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    front = found.front
    others = [row for row in found.rows if row.role != "control" and row not in front]
    axis.plot(
        [row.speedup for row in others], [_mean(row)[0] for row in others], "o", markersize=5, color=GREY, label="measured"
    )
    if front:
        points = [(row.speedup, *_mean(row)) for row in front]
        x, y, error = (list(values) for values in zip(*points, strict=True))
        axis.errorbar(
            x, y, yerr=error, fmt="o-", color=BLUE, markersize=5.5, linewidth=1.4, capsize=2, elinewidth=1, label="Pareto front"
        )
    for name, marker in MARKERS.items():
        rows = [row for row in found.rows if row.role == "control" and row.candidate["method"] == name]
        if rows:
            axis.plot(
                [row.speedup for row in rows],
                [_mean(row)[0] for row in rows],
                marker,
                markersize=7,
                markerfacecolor="white",
                markeredgecolor=ORANGE,
                markeredgewidth=1.6,
                linestyle="",
                label=f"control: {name}{' alone' if name == 'resize' else ''}",
                zorder=4,
            )
    if found.best is not None:
        at = found.best.speedup, _mean(found.best)[0]
        axis.plot(*at, "*", markersize=15, color=GREEN, zorder=5, label=f"best: {found.best.plan}")


def _mean(row: Measured) -> tuple[float, float]:
    """The mean distance of a row and its standard error."""
    return mean_and_stderr(torch.tensor(next(iter(row.values.values()))))


def _decades(axis: Any) -> float:
    import math

    low, high = axis.get_ylim()
    return math.log10(high / low)


def _minor(value: float, _: object) -> str:
    """Labels at 2 and 5 of every decade."""
    digit = f"{value:e}"[0]
    return f"{value:g}" if digit in "25" else ""
