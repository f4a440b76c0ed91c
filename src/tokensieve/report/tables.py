"""The tables of a section: one row for each result, and all metrics."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tokensieve.report import plots
from tokensieve.report.fields import NOTHING, Result, mapping_at, mark_kind, number_of, plan_label, speed_up, unchanged
from tokensieve.tasks.registry import is_percent


def display_scale(metric: str, rows: Sequence[Result]) -> tuple[float, str]:
    """The factor by which a metric of these results is shown, and its unit."""
    return (100.0, ", %") if is_percent(metric, str(rows[0].get("task"))) else (1.0, "")


def _value(result: Result, metric: str | None) -> str:
    value = None if metric is None else number_of(result["metrics"].get(metric))
    if value is None or metric is None:
        return NOTHING
    times, unit = display_scale(metric, [result])
    error = number_of(result["metrics"].get(f"{metric}_stderr"))

    def text(number: float) -> str:
        return f"{times * number:.2f}" if unit else f"{number:.4g}"

    return text(value) + (f" <span class='soft'>± {text(error)}</span>" if error is not None else "")


def render_table(rows: Sequence[Result], metric: str | None) -> str:
    head = [
        "#",
        "plan",
        "patch tokens",
        f"{metric}{display_scale(metric, rows)[1]}" if metric else "metric",
        "GFLOPs",
        "images/s",
        "speed-up",
    ]
    lines = []
    for number, row in enumerate(rows, start=1):
        done, faster = mapping_at(row, "reduction"), speed_up(row)
        tokens, cost, speed = done.get("tokens_out"), number_of(done.get("gflops")), number_of(done.get("images_per_second"))
        cells = [
            NOTHING
            if tokens is None
            else escape(f"{done.get('tokens_in')} → {tokens}" if tokens != done.get("tokens_in") else str(tokens)),
            _value(row, metric),
            NOTHING if cost is None else f"{cost:.3g}",
            NOTHING if speed is None else f"{speed:.1f}",
            NOTHING if faster is None else f"{faster:.2f}×",
        ]
        mark = plots.legend_mark(mark_kind(row, rows))
        first = (
            f"<td class='soft'>{number}</td><th scope='row'>{mark} <code>{escape(plan_label(row))}</code>{_effect(row)}</th>"
        )
        lines.append(f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    heads = "".join(f"<th scope='col'>{escape(name)}</th>" for name in head)
    table = f"<table class='sortable'><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<div class='wide'>{table}</div>{_all_metrics(rows)}"


def _effect(result: Result) -> str:
    """A remark behind a plan that did nothing."""
    effect = unchanged(result)
    return "" if effect is None else f" <span class='soft'>({effect.removeprefix('was ')})</span>"


def _all_metrics(rows: Sequence[Result]) -> str:
    """Every number of every result, folded away."""
    names = list(dict.fromkeys(name for row in rows for name, value in row["metrics"].items() if number_of(value) is not None))
    names = [name for name in names if not name.endswith("_stderr")]
    if len(names) < 2:
        return ""
    head = "".join(f"<th scope='col'>{escape(name + display_scale(name, rows)[1])}</th>" for name in names)
    lines = "".join(
        f"<tr><td class='soft'>{number}</td><th scope='row'><code>{escape(plan_label(row))}</code></th>"
        + "".join(f"<td>{_value(row, name)}</td>" for name in names)
        + "</tr>"
        for number, row in enumerate(rows, start=1)
    )
    head = f"<tr><th scope='col'>#</th><th scope='col'>plan</th>{head}</tr>"
    table = f"<table class='sortable'><thead>{head}</thead><tbody>{lines}</tbody></table>"
    return f"<details><summary>all metrics</summary><div class='wide'>{table}</div></details>"
