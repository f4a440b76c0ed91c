"""The sections of the page: results of one experiment, with table, notes, plots and commands."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from tokensieve.evaluation.flags import eval_flags
from tokensieve.report import plots
from tokensieve.report.commands import render_settings
from tokensieve.report.fields import (
    NOTHING,
    Result,
    main_metric,
    mapping_at,
    mark_kind,
    method_label,
    method_name,
    number_of,
    plan_label,
    speed_up,
    unchanged,
    value_text,
)
from tokensieve.report.plots import Point
from tokensieve.report.tables import display_scale, render_table

WORDS = 8  # so many points in a plot get their plan's text, more get its number in the table
MEASURED_SETTINGS = {"dtype": None}  # not a flag, but also makes another experiment
# Fingerprints that make another experiment; headings name them where the settings do not tell the sections apart.
MARKS = ("amp", "classifiers", "weights", "data")
FINGERPRINT = re.compile("[0-9a-f]{16,}")


def separating_settings() -> dict[str, Any]:
    """The settings that make another experiment, each with the value of results that do not have it."""
    flags = [flag for group in eval_flags().values() for flag in group if flag.separates_results]
    return {flag.dest: flag.default for flag in flags} | MEASURED_SETTINGS


def group_sections(found: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Results by model, data set, task, language and what else makes another experiment, of which headings name what differs.

    In a section the full model comes first, then from many tokens to few; of as many tokens the best first.
    """
    settings = separating_settings()
    named: dict[str, dict[tuple[str, ...], list[Result]]] = {}
    for result in found:
        weights = Path(str(result["pretrained"])).name
        model = f"{result['model']} ({weights})" if weights else str(result["model"])
        language = result.get("language")
        details = [str(result.get("task") or ""), "" if language in (None, "en") else str(language)]
        name = ", ".join([f"{model} on {result['dataset']}", *filter(None, details)])
        named.setdefault(name, {}).setdefault(_experiment(result, settings), []).append(result)
    sections = []
    for name, experiments in named.items():
        for heading, rows in zip(_headings(name, list(experiments), list(settings)), experiments.values(), strict=True):
            sections.append((heading, sorted(rows, key=_order)))
    return sections


def _order(row: Result) -> tuple[bool, float, float, str]:
    metric = main_metric([row])
    quality = None if metric is None else number_of(row["metrics"].get(metric))
    tokens = number_of(mapping_at(row, "reduction").get("tokens_out")) or 0
    return method_name(row) != "none", -tokens, math.inf if quality is None else -quality, plan_label(row)


def _experiment(result: Result, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings, then the fingerprints, of a result as texts."""
    run = mapping_at(result, "run")
    marks = (run.get(name) or None for name in MARKS)
    return (*(value_text(run.get(name, default)) for name, default in settings.items()), *map(value_text, marks))


def _headings(name: str, experiments: Sequence[tuple[str, ...]], settings: Sequence[str]) -> list[str]:
    """A heading for each experiment: the name that they share, and the settings in which they differ."""

    def count_different(columns: Sequence[int]) -> int:
        return len({tuple(values[column] for column in columns) for values in experiments})

    words = [*settings, *MARKS]
    differ = [column for column in range(len(settings)) if count_different([column]) > 1]
    for column in range(len(settings), len(words)):
        if count_different([*differ, column]) > count_different(differ):
            differ.append(column)
    return [", ".join([name, *(_difference(words[column], values[column]) for column in differ)]) for values in experiments]


def _difference(name: str, value: str) -> str:
    """The heading's words for a setting, or for a fingerprint, of which the beginning is enough."""
    return f"{name} not given" if value == NOTHING else f"{name} {FINGERPRINT.sub(lambda mark: mark[0][:8], value)}"


def render_section(number: int, name: str, rows: Sequence[Result]) -> str:
    metric = main_metric(rows)
    parts = [f"<section id='s{number}'><h2>{escape(name)}</h2>", render_table(rows, metric)]
    notes = {note: None for row in rows for note in mapping_at(row, "reduction").get("notes") or ()}
    for row in rows:
        done = mapping_at(row, "reduction")
        if (effect := unchanged(row)) is not None:
            notes[f"{plan_label(row)} {effect}: {done.get('reason')}. Its numbers are those of the full model."] = None
    if notes:
        parts.append("<ul class='notes'>" + "".join(f"<li>{escape(str(note))}</li>" for note in notes) + "</ul>")
    if metric is not None:
        parts.append(_plots(rows, metric, name))
    return "\n".join([*parts, render_settings(rows), "</section>"])


class Drawn(NamedTuple):
    """What one plot shows."""

    cost: str  # a word
    across: str
    up: str
    points: list[Point]


def section_plots(rows: Sequence[Result], metric: str) -> list[Drawn]:
    """Quality over measured time and over GFLOPs."""
    times, unit = display_scale(metric, rows)

    def points(cost: Callable[[Result], float | None]) -> list[Point]:
        made = []
        for number, row in enumerate(rows, start=1):
            x, y, error = cost(row), number_of(row["metrics"].get(metric)), number_of(row["metrics"].get(f"{metric}_stderr"))
            if x is not None and y is not None:
                label = plan_label(row) if len(rows) <= WORDS else str(number)
                spread = "" if error is None else f" ± {times * error:.2f}"
                tooltip = f"{plan_label(row)}: {metric} {times * y:.2f}{spread}, cost {x:.3g}"
                error = None if error is None else times * error
                made.append(Point(x, times * y, error, label, tooltip, mark_kind(row, rows)))
        return made

    costs: tuple[tuple[str, str, Callable[[Result], float | None]], ...] = (
        (
            "time",
            "measured time of an image, full model = 1",
            lambda row: 1 / faster if (faster := speed_up(row)) else None,
        ),
        ("gflops", "GFLOPs of an image", lambda row: number_of(mapping_at(row, "reduction").get("gflops"))),
    )
    return [Drawn(word, across, f"{metric}{unit}", points(cost)) for word, across, cost in costs]


def _plots(rows: Sequence[Result], metric: str, name: str) -> str:
    """The plots of a section with their legend."""
    figures = []
    for _, across, up, measured in section_plots(rows, metric):
        left_out = len(rows) - len(measured)
        if measured:
            drawn = plots.plot(measured, across, up, f"{metric} over {across}, {name}")
            caption = (
                f"<figcaption class='soft'>{left_out} without such a measurement left out</figcaption>" if left_out else ""
            )
            figures.append(f"<figure class='chart'>{drawn}{caption}</figure>")
        else:
            figures.append(
                f"<p class='soft'>No plot over {escape(across.split(',')[0])}: it was not measured in these runs.</p>"
            )
    kinds = dict.fromkeys((mark_kind(row, rows), method_label(row)) for row in rows)
    legend = "".join(f"<span>{plots.legend_mark(kind)} {escape(word)}</span>" for kind, word in kinds)
    legend += f"<span>{plots.legend_mark('frontier')} best at its cost</span>"
    numbered = "; numbers are those of the table" if len(rows) > WORDS else ""
    legend += f"<span class='soft'>bars: one standard error{numbered}</span>"
    return f"<div class='legend'>{legend}</div><div class='plots'>{''.join(figures)}</div>"
