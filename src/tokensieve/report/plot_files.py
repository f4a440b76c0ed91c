"""The plots of the report as files: each as PNG and as SVG, in black on white."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokensieve import files
from tokensieve.report.fields import Result, main_metric
from tokensieve.report.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Point, frontier, labels, ranges
from tokensieve.report.sections import section_plots

DPI = 100
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195")  # as on the page
MARKERS = {"none": "D", "control-0": "o", "control-1": "s", "control-2": "^"}


def write(sections: Sequence[tuple[str, Sequence[Result]]], folder: str) -> list[Path]:
    """Write every plot of these sections into the folder, as NUMBER-COST.png and .svg; the files."""
    written = []
    for number, (name, rows) in enumerate(sections, start=1):
        metric = main_metric(rows)
        for drawn in section_plots(rows, metric) if metric is not None else ():
            for suffix in ("png", "svg"):
                path = Path(folder) / f"{number}-{drawn.cost}.{suffix}"
                if drawn.points:
                    files.replace_file(path, draw(drawn.points, drawn.across, drawn.up, name, suffix))
                    written.append(path)
    return written


def draw(points: Sequence[Point], across: str, up: str, title: str, kind: str) -> bytes:
    """One plot as a file of this kind, "png" or "svg"; its labels are where they are on the page."""
    import matplotlib
    from matplotlib.figure import Figure

    high = HEIGHT + 20  # and the title
    figure = Figure(figsize=(WIDTH / DPI, high / DPI), dpi=DPI, facecolor="white")
    size = (WIDTH - LEFT - RIGHT) / WIDTH, (HEIGHT - TOP - BOTTOM) / high
    axes = figure.add_axes((LEFT / WIDTH, BOTTOM / high, *size))
    (left, right), (low, top) = ranges(points)
    axes.set(xlim=(left, right), ylim=(low, top))
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    text: Any = {"parse_math": False}
    axes.set_xlabel(across, fontsize=8, **text)
    axes.set_ylabel(up, fontsize=8, **text)
    figure.text(0.01, 0.985, title, fontsize=7.5, va="top", **text)
    best = frontier(points)
    axes.step([p.x for p in best], [p.y for p in best], where="post", color="#666666", linestyle="--", linewidth=1)
    for point in points:
        colour = COLOURS[int(point.kind)] if point.kind.isdigit() else "#1a1a1a"
        style: Any = {"marker": MARKERS.get(point.kind, "o"), "markersize": 5, "color": colour}
        hollow: Any = {"markerfacecolor": "white"} if point.kind.startswith("control") else {}
        axes.errorbar(point.x, point.y, yerr=point.error or None, capsize=2, elinewidth=0.8, **style, **hollow)
    inner = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    spots = [(LEFT + (p.x - left) / (right - left) * inner[0], TOP + (top - p.y) / (top - low) * inner[1]) for p in points]
    for point, (x, y), label in zip(points, spots, labels([p.label for p in points], spots), strict=True):
        if label is None:
            continue
        at = (label.x - LEFT) / inner[0], 1 - (label.y - TOP) / inner[1]  # shares of the axes
        axes.text(*at, point.label, transform=axes.transAxes, fontsize=7, **text)
        if label.is_far:
            ends = [((a - LEFT) / inner[0], 1 - (b - TOP) / inner[1]) for a, b in ((x, y), label.nearest_to(x))]
            axes.plot(*zip(*ends, strict=True), transform=axes.transAxes, color="#bbbbbb", linewidth=0.7, zorder=0)
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tokensieve"}):
        figure.savefig(buffer, format=kind, dpi=2 * DPI, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()
