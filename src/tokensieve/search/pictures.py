"""Plots of a search: its history, the importance of the keys, the values of the best trials, and the Pareto front."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tokensieve import files
from tokensieve.config.search import Dimension, Search
from tokensieve.search import space
from tokensieve.search.study import distinct_trials, first_number, import_optuna, without_warnings

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

BLUE, ORANGE, GREY = "#2563a8", "#d9730d", "#b4b8bf"


def draw(study: optuna.Study, settings: Search, folder: Path) -> None:
    """history.png, importances.png, parallel.png, and pareto.png with two objectives or more."""
    trials = [trial for trial in distinct_trials(study) if trial.state.name == "COMPLETE"]
    _save(history(study, trials, settings), folder / "history.png")
    _save(parallel(trials, settings), folder / "parallel.png")
    weights = importances(study, trials, settings)
    if weights:
        _save(bars(weights), folder / "importances.png")
    if len(settings.objectives) > 1:
        _save(pareto(study, trials, settings), folder / "pareto.png")


def _save(figure: Figure, path: Path) -> None:
    canvas, file = FigureCanvasAgg(figure), io.BytesIO()
    canvas.print_png(file)
    files.write_bytes(path, file.getvalue())


def _figure(rows: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def history(study: optuna.Study, trials: list[FrozenTrial], settings: Search) -> Figure:
    """Every trial's objectives in the order of the trials, and the best so far."""
    figure, axes = _figure(len(settings.objectives), 7, 0.6 + 2.8 * len(settings.objectives))
    for index, (axis, objective) in enumerate(zip(axes, settings.objectives, strict=True)):
        at = [first_number(trial) for trial in trials]
        values = np.array([trial.values[index] for trial in trials])
        best = np.maximum.accumulate(values) if objective.direction == "maximize" else np.minimum.accumulate(values)
        axis.plot(at, values, "o", color=BLUE, label="trial")
        axis.step(at, best, where="post", color=ORANGE, label="best so far")
        pruned = [trial for trial in distinct_trials(study) if trial.state.name == "PRUNED" and trial.intermediate_values]
        if len(settings.objectives) == 1 and pruned:
            last = [trial.intermediate_values[max(trial.intermediate_values)] for trial in pruned]
            axis.plot([first_number(trial) for trial in pruned], last, "x", color=GREY, label="pruned, its last value")
        axis.set_ylabel(objective.name)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(frameon=False, fontsize=8)
    axes[-1].set_xlabel("trial")
    return figure


def importances(study: optuna.Study, trials: list[FrozenTrial], settings: Search) -> dict[str, dict[str, float]]:
    """By objective: the share of its variance that each key explains (fANOVA); keys that do not vary are left out."""
    optuna, shares = import_optuna(), {}
    for index, objective in enumerate(settings.objectives):
        values = [trial.values[index] for trial in trials]
        varied = [key for key in settings.space if len({trial.params[key] for trial in trials}) > 1]
        if len(set(values)) < 2 or not varied:
            continue
        with without_warnings():
            evaluator = optuna.importance.FanovaImportanceEvaluator(seed=settings.seed)
            share = optuna.importance.get_param_importances(
                study, evaluator=evaluator, params=varied, target=lambda trial, index=index: trial.values[index]
            )
        shares[objective.name] = dict(share)
    return shares


def bars(weights: dict[str, dict[str, float]]) -> Figure:
    """How much each key matters for each objective."""
    keys = sorted(next(iter(weights.values())), key=lambda key: sum(share[key] for share in weights.values()))
    figure, (axis,) = _figure(1, 7, 1.2 + 0.42 * len(keys) * (0.6 + 0.4 * len(weights)))
    height = 0.8 / len(weights)
    colors = (BLUE, ORANGE, "#4d8f4d", "#8a5fa8")
    for index, (name, share) in enumerate(weights.items()):
        at = np.arange(len(keys)) + (len(weights) - 1) * height / 2 - index * height
        made = axis.barh(at, [share[key] for key in keys], height, color=colors[index % 4], label=name)
        axis.bar_label(made, fmt="%.2f", padding=3, fontsize=8)
    axis.set_yticks(range(len(keys)), space.short_names(keys).values(), fontsize=8)
    axis.set_xlim(0, 1.08)
    axis.set_xlabel("share of the objective's variance")
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def pareto(study: optuna.Study, trials: list[FrozenTrial], settings: Search) -> Figure:
    """The first objective against each of the others, with the Pareto front."""
    first, *others = settings.objectives
    figure, axes = _figure(len(others), 6.4, 0.4 + 4 * len(others))
    best = {trial.number for trial in study.best_trials}
    for index, (axis, objective) in enumerate(zip(axes, others, strict=True), 1):
        front = sorted((trial.values[index], trial.values[0], trial) for trial in trials if trial.number in best)
        rest = [trial for trial in trials if trial.number not in best]
        axis.plot([t.values[index] for t in rest], [t.values[0] for t in rest], "o", color=GREY, label="trial")
        line = "-" if len(others) == 1 else ""
        axis.plot([x for x, _, _ in front], [y for _, y, _ in front], f"{line}o", color=ORANGE, label="Pareto front")
        for x, y, trial in front:
            number = str(first_number(trial))
            axis.annotate(number, (x, y), xytext=(4, 5), textcoords="offset points", fontsize=8)
        axis.set_xlabel(f"{objective.name} ({objective.direction})")
        axis.set_ylabel(f"{first.name} ({first.direction})")
        axis.margins(0.08)
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def parallel(trials: list[FrozenTrial], settings: Search) -> Figure:
    """A line for each trial through its values, coloured by the first objective."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    objective, keys = settings.objectives[0], list(settings.space)
    figure, (axis,) = _figure(1, 2.4 + 1.5 * (len(keys) + 1), 4.6)
    columns = [[trial.params[key] for trial in trials] for key in keys] + [[trial.values[0] for trial in trials]]
    heights = np.empty((len(trials), len(columns)))
    for at, values in enumerate(columns):
        dimension = settings.space[keys[at]] if at < len(keys) else Dimension(low=min(values), high=max(values))
        heights[:, at], ticks = scaled(values, dimension)
        axis.axvline(at, color=GREY, linewidth=1)
        for height, text in ticks:
            back = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
            axis.annotate(text, (at, height), xytext=(4, 0), textcoords="offset points", fontsize=7, va="center", bbox=back)
    values = columns[-1]
    norm, colors = Normalize(min(values), max(values) if max(values) > min(values) else min(values) + 1), colormaps["viridis"]
    order = np.argsort(values) if objective.direction == "maximize" else np.argsort(values)[::-1]
    for row in order:  # the best on top
        axis.plot(range(len(columns)), heights[row], color=colors(norm(values[row])), linewidth=1.4, alpha=0.85)
    axis.set_xticks(range(len(columns)), [*space.short_names(keys).values(), objective.name], fontsize=8)
    axis.set_yticks([])
    axis.set_ylim(-0.04, 1.04)
    axis.spines[["left", "bottom"]].set_visible(False)
    figure.colorbar(ScalarMappable(norm, colors), ax=axis, label=f"{objective.name} ({objective.direction})", pad=0.1)
    return figure


def scaled(values: Sequence[Any], dimension: Dimension) -> tuple[Any, list[tuple[float, str]]]:
    """Values from 0 to 1 on the axis of their dimension, and its ticks: height and text."""
    if dimension.choices is not None:
        words = [space.storable(choice) for choice in dimension.choices]
        ticks = [((i + 0.5) / len(words), str(text)) for i, text in enumerate(words)]
        return [(words.index(value) + 0.5) / len(words) for value in values], ticks
    forward, back = (np.log, np.exp) if dimension.log else (np.asarray, np.asarray)
    low, high = forward(np.array([dimension.low, dimension.high], dtype=float))
    heights = (forward(values) - low) / (high - low) if high > low else [0.5] * len(values)
    return heights, [(height, f"{back(low + height * (high - low)):.4g}") for height in (0, 0.5, 1)]
