"""A Pareto plot as SVG text for a page: no font, and the colours are the page's own, in light and in dark. The page's script
shows the tooltips; without it the browser does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 380
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 46  # margins
LETTER, LINE = 6.7, 13  # width of a letter and height of a line of the labels
DISTANCES = (8, 14, 22, 34, 48, 64, 84, 108, 136, 170)  # of labels from their points; the first three need no line


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
    (left, right), (low, high) = ranges(points)

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
    for point, (x, y), label in zip(points, spots, labels([point.label for point in points], spots), strict=True):
        if label is None:
            continue
        if label.is_far:
            parts.append(_line("grid", x, y, *label.nearest_to(x)))
        parts.append(f'<text class="label" x="{label.x:.1f}" y="{label.y:.1f}">{escape(point.label)}</text>')
    return "".join([*parts, "</svg>"])


def ranges(points: Sequence[Point]) -> tuple[tuple[float, float], tuple[float, float]]:
    """From where to where the axes go: (left, right), (low, high)."""
    return _range([point.x for point in points]), _range([p.y + side * (p.error or 0) for p in points for side in (-1, 1)])


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


@dataclass(frozen=True)
class Label:
    """Where a label begins: its left end, its base line."""

    x: float
    y: float
    width: float
    is_far: bool  # a line joins it with its point

    @property
    def box(self) -> tuple[float, float, float, float]:
        return self.x, self.y - LINE + 3, self.x + self.width, self.y + 3

    def nearest_to(self, x: float) -> tuple[float, float]:
        """Where the line from a point at x ends."""
        return min(max(x, self.x), self.x + self.width), self.y - LINE / 2 + 3


def labels(texts: Sequence[str], spots: Sequence[tuple[float, float]]) -> list[Label | None]:
    """A place for each label: as near to its point as it covers no point and no other label; None if there is none."""
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
    placed: list[Label | None] = []
    for text, (x, y) in zip(texts, spots, strict=True):
        found = next((label for label in _places(LETTER * len(text), x, y) if _is_free(label.box, taken)), None)
        if found is not None:
            taken.append(found.box)
        placed.append(found)
    return placed


def _places(wide: float, x: float, y: float) -> Iterator[Label]:
    """Places for a label of this width inside the frame, from near to far."""
    most = WIDTH - RIGHT - wide - 2
    if most < LEFT + 2:
        return  # wider than the frame
    for far in DISTANCES:
        for across, down in (
            (far, 4),
            (-far - wide, 4),
            (-wide / 2, -far),
            (-wide / 2, far + 9),
            (far, -far),
            (far, far + 9),
            (-far - wide, -far),
            (-far - wide, far + 9),
        ):
            left, base = min(max(x + across, LEFT + 2), most), min(max(y + down, TOP + 10), HEIGHT - BOTTOM - 3)
            yield Label(left, base, wide, far > DISTANCES[2])


def _is_free(box: tuple[float, float, float, float], taken: Sequence[tuple[float, float, float, float]]) -> bool:
    return all(_overlap(box, other) == 0 for other in taken)


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
