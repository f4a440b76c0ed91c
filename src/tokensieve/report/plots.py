"""A Pareto plot as SVG text for a page: no font, and the colours are the page's own, in light and in dark. The page's script
shows the tooltips; without it the browser does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 380
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 46  # margins
LETTER, LINE = 6.7, 13  # width of a letter and height of a line of the labels


@dataclass(frozen=True)
class Point:
    """One result."""

    x: float
    y: float
    error: float | None  # standard error of y
    label: str  # short, beside the point
    tooltip: str  # shown when the pointer is over the point
    kind: str  # "none": the full model; "control-0", ...: a control of that shape; "0", "1", ...: a method of that colour


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other point beats: nothing costs as little and is better, nothing is as good and costs less."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, -point.y)):
        if not best or point.y > best[-1].y:
            best.append(point)
    return best


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers from low to high.

    >>> ticks(0.31, 1.02)
    [0.4, 0.6, 0.8, 1.0]
    """
    step = 10 ** math.floor(math.log10((high - low) / about))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= about)
    return [round(number * step, 12) for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def plot(points: Sequence[Point], across: str, up: str, title: str) -> str:
    """The points with error bars, and the frontier of the best; x is a cost, y is better when it is higher."""
    left, right = _range([point.x for point in points])
    low, high = _range([point.y + side * (point.error or 0) for point in points for side in (-1, 1)])

    def place(x: float, y: float) -> tuple[float, float]:
        inner = (WIDTH - LEFT - RIGHT), (HEIGHT - TOP - BOTTOM)
        return LEFT + (x - left) / (right - left) * inner[0], TOP + (high - y) / (high - low) * inner[1]

    parts = [f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="group"><title>{escape(title)}</title>']
    for value in ticks(left, right):
        x, _ = place(value, low)
        parts.append(_line("grid", x, TOP, x, HEIGHT - BOTTOM))
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    for value in ticks(low, high):
        _, y = place(left, value)
        parts.append(_line("grid", LEFT, y, WIDTH - RIGHT, y))
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="axis" x="{middle[0]}" y="{HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>')
    turned = f'transform="rotate(-90 14 {middle[1]})"'
    parts.append(f'<text class="axis" x="14" y="{middle[1]}" text-anchor="middle" {turned}>{escape(up)}</text>')
    parts.append(_staircase([place(point.x, point.y) for point in frontier(points)]))
    spots = [place(point.x, point.y) for point in points]
    for point, (x, _) in zip(points, spots, strict=True):
        if point.error:
            ends = place(point.x, point.y + point.error)[1], place(point.x, point.y - point.error)[1]
            cls = f"error k-{escape(point.kind)}"
            parts.append(_line(cls, x, ends[0], x, ends[1]) + "".join(_line(cls, x - 3, end, x + 3, end) for end in ends))
    for point, (x, y) in zip(points, spots, strict=True):
        parts.append(
            f'<g class="point" tabindex="0" role="img">{_mark(point.kind, x, y)}<title>{escape(point.tooltip)}</title></g>'
        )
    for point, (x, y) in zip(points, _labels([point.label for point in points], spots), strict=True):
        parts.append(f'<text class="label" x="{x:.1f}" y="{y:.1f}">{escape(point.label)}</text>')
    return "".join([*parts, "</svg>"])


def legend_mark(kind: str) -> str:
    """The mark of a kind, or a bit of the frontier, by itself."""
    drawn = '<path class="frontier" d="M0,11H7V3H14"/>' if kind == "frontier" else _mark(kind, 7, 7)
    return f'<svg class="mark" viewBox="0 0 14 14" aria-hidden="true">{drawn}</svg>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    slack = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
    return low - slack, high + slack


def _line(cls: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{cls}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _mark(kind: str, x: float, y: float) -> str:
    """Controls are hollow: a circle, a square or a triangle; the full model is a diamond, methods are filled circles."""
    corners: dict[str, list[tuple[float, float]]] = {
        "none": [(0, -6), (6, 0), (0, 6), (-6, 0)],
        "control-1": [(-4.5, -4.5), (4.5, -4.5), (4.5, 4.5), (-4.5, 4.5)],
        "control-2": [(0, -5.5), (5.5, 4.5), (-5.5, 4.5)],
    }
    if kind in corners:
        around = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners[kind])
        return f'<polygon class="mark k-{kind}" points="{around}"/>'
    return f'<circle class="mark k-{escape(kind)}" cx="{x:.1f}" cy="{y:.1f}" r="4.8"/>'


def _staircase(spots: Sequence[tuple[float, float]]) -> str:
    """From each to the next: the better one costs its own price, up to it the cheaper one is the best there is."""
    if len(spots) < 2:
        return ""
    steps = [f"M{spots[0][0]:.1f},{spots[0][1]:.1f}"] + [f"H{x:.1f}V{y:.1f}" for x, y in spots[1:]]
    return f'<path class="frontier" d="{"".join(steps)}"/>'


def _labels(labels: Sequence[str], spots: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Where each label begins (its left end, its base line): beside its point, where it covers least of what is there."""
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
    placed = []
    for label, (x, y) in zip(labels, spots, strict=True):
        wide = LETTER * len(label)
        choices = []
        for far in (8, 14, 22):
            for dx, dy in ((far, 4), (-far - wide, 4), (-wide / 2, -far), (-wide / 2, far + 9), (far, -far), (far, far + 9)):
                start = min(max(x + dx, LEFT + 2), WIDTH - RIGHT - wide - 2), min(max(y + dy, TOP + 10), HEIGHT - BOTTOM - 3)
                box = start[0], start[1] - LINE + 3, start[0] + wide, start[1] + 3
                choices.append((sum(_overlap(box, other) for other in taken) + far / 4, start, box))
        _, start, box = min(choices, key=lambda choice: choice[0])
        taken.append(box)
        placed.append(start)
    return placed


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
