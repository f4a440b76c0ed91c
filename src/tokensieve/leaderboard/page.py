"""The leaderboard as one HTML page that loads nothing from elsewhere: sortable tables and a plot for each task."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tokensieve.leaderboard import curves
from tokensieve.leaderboard.markdown import budget_text, number, scale, title
from tokensieve.leaderboard.rows import Row
from tokensieve.report import plots
from tokensieve.report.page import render_page
from tokensieve.report.plots import Point

COLOURS = 7  # of methods in a plot; those after them share the last colour
LABELLED = 12  # so many points of the frontier get a label
HEAD = (
    ("method", "the name in a plan"),
    ("placement", "authors: where the authors put it; else the same place for all methods"),
    ("budget", "tokens left at the end"),
    ("plan", "to copy"),
    ("tokens left", "of how many"),
    ("score", ""),
    ("difference", "to the full model, on the same samples, with its standard error"),
    ("GFLOPs", ""),
    ("time", "measured, full model = 1"),
    ("oracle's time", "the same tokens chosen at no cost"),
    ("speed-up", "measured"),
    ("resize at equal time", "a smaller image of the same measured time, between measured points"),
    ("samples", ""),
    ("at 2x", "score at twice the measured speed, between measured points; empty where that was not reached"),
)


def build(rows: Sequence[Row], heading: str = "Leaderboard of token reduction") -> str:
    """The page of these rows."""
    found = curves.boards(rows)
    body = [f"<h1>{escape(heading)}</h1>", f"<p class='soft'>{escape(_summary(rows))}</p>"]
    links = (f"<li><a href='#b{n}'>{escape(title(part))}</a></li>" for n, part in enumerate(found.values(), start=1))
    body.append(f"<nav><ul>{''.join(links)}</ul></nav>")
    for n, part in enumerate(found.values(), start=1):
        body.append(f"<section id='b{n}'><h2>{escape(title(part))}</h2>{_plot(part)}{_table(part)}</section>")
    return render_page(heading, "\n".join(body))


def _summary(rows: Sequence[Row]) -> str:
    methods, models = {row["method"] for row in rows}, {row["model"] for row in rows}
    versions = sorted({row["versions"]["tokensieve"] for row in rows})
    return (
        f"{len(rows)} rows, {len(methods)} methods, {len(models)} models; tokensieve {', '.join(versions)}. Times are "
        "measured, each in the same rounds as the full model. Click a heading to sort."
    )


def _table(rows: Sequence[Row]) -> str:
    points, resized, times = curves.curves(rows), curves.resize_curve(rows), scale(rows[0])
    head = "".join(f"<th scope='col' title='{escape(about, quote=True)}'>{escape(name)}</th>" for name, about in HEAD)
    order = sorted(rows, key=lambda row: (row["method"], row["placement"], -(row["budget"] or 2.0)))
    lines = []
    for row in order:
        at_two = curves.read_off(points[row["method"], row["placement"]], curves.TARGET)
        equal = curves.read_off(resized, curves.speedup(row)) if row["method"] != curves.RESIZE else None
        error = number(row["difference_stderr"], times)
        oracle = row["oracle_ratio"]
        cells: list[tuple[object, str]] = [
            (row["method"], escape(row["method"]) + (" <span class='soft'>control</span>" if row["control"] else "")),
            (row["placement"], escape(row["placement"])),
            ("" if row["budget"] is None else row["budget"], budget_text(row["budget"])),
            (row["plan"], f"<code>{escape(row['plan'])}</code>"),
            (row["tokens_left"] / row["tokens_in"], f"{row['tokens_left']:g} of {row['tokens_in']:g}"),
            (row["score"], number(row["score"], times)),
            (row["difference"], f"{number(row['difference'], times)} <span class='soft'>± {error}</span>"),
            (row["gflops"], f"{row['gflops']:.3g}"),
            (row["time_ratio"], f"{row['time_ratio']:.2f}"),
            ("" if oracle is None else oracle, "" if oracle is None else f"{oracle:.2f}"),
            (curves.speedup(row), f"{curves.speedup(row):.2f}×"),
            ("" if equal is None else equal, number(equal, times)),
            (row["samples"], str(row["samples"])),
            ("" if at_two is None else at_two, number(at_two, times)),
        ]
        drawn = "".join(f"<td data-value='{escape(str(value), quote=True)}'>{text}</td>" for value, text in cells)
        lines.append(f"<tr>{drawn}</tr>")
    table = f"<table class='sortable dense'><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<div class='wide'>{table}</div>"


def _plot(rows: Sequence[Row]) -> str:
    """Score over measured time; the best at their cost have a label, the others a tooltip."""
    times, first = scale(rows[0]), rows[0]
    kinds = _kinds(rows)
    points = [Point(1.0, times * first["score_none"], None, "full", "full model", "none")]
    for row in rows:
        tooltip = f"{row['plan']} ({row['placement']}): {number(row['score'], times)}, time {row['time_ratio']:.2f}"
        kind = kinds[row["method"]]
        points.append(Point(row["time_ratio"], times * row["score"], None, "", tooltip, kind))
    best = [(point.x, point.y) for point in plots.frontier(points)][:LABELLED]
    named = []
    for point, label in zip(points, ["full", *(row["method"] for row in rows)], strict=True):
        text = label if (point.x, point.y) in best or point.kind == "none" else ""
        named.append(Point(point.x, point.y, None, text, point.tooltip, point.kind))
    drawn = plots.plot(named, "measured time, full model = 1", f"{first['metric']}{', %' if times == 100 else ''}", title(rows))
    marks = {"none": "full model"} | {kind: "" for kind in kinds.values()}
    for method, kind in kinds.items():
        marks[kind] = f"{marks[kind]}, {method}".strip(", ") if not marks[kind].endswith("others") else marks[kind]
        if kind == str(COLOURS - 1) and len([m for m in kinds if kinds[m] == kind]) > 1:
            marks[kind] = "others"
    legend = "".join(f"<span>{plots.legend_mark(kind)} {escape(word)}</span>" for kind, word in marks.items())
    legend += f"<span>{plots.legend_mark('frontier')} best at its cost</span>"
    return f"<div class='legend'>{legend}</div><figure class='chart' style='max-width:760px'>{drawn}</figure>"


def _kinds(rows: Sequence[Row]) -> dict[str, str]:
    """The mark of each method: hollow for controls; colours for those that are best at twice the speed, then one for all."""
    found = curves.curves(rows)
    controls = list(dict.fromkeys(row["method"] for row in rows if row["control"]))
    at_two: dict[str, float] = {}
    for (method, _), points in found.items():
        value = curves.read_off(points, curves.TARGET)
        at_two[method] = max(at_two.get(method, float("-inf")), float("-inf") if value is None else value)
    methods = sorted((method for method in at_two if method not in controls), key=lambda method: -at_two[method])
    kinds = {method: str(min(n, COLOURS - 1)) for n, method in enumerate(methods)}
    return kinds | {method: f"control-{min(n, 2)}" for n, method in enumerate(controls)}
