"""The plots of the report: the frontier, points within the frame, labels that do not overlap."""

from __future__ import annotations

import re

import pytest

from tokensieve.report import plots
from tokensieve.report.plots import Point


def point(x: float, y: float) -> Point:
    return Point(x, y, None, "p", "tooltip", "0")


def test_frontier_against_all_pairs() -> None:
    points = [point(x * 7 % 11, x * 5 % 13) for x in range(30)]
    beaten = {(a.x, a.y) for a in points for b in points if b.x <= a.x and b.y >= a.y and (b.x < a.x or b.y > a.y)}
    assert {(a.x, a.y) for a in plots.frontier(points)} == {(a.x, a.y) for a in points} - beaten


@pytest.mark.parametrize("points", [[point(1, 1)], [point(0, 0)], [point(1, 2), point(1, 2)], [point(1e-9, 1e9), point(5, -3)]])
def test_plots_of_few_or_extreme_points_stay_within_the_frame(points: list[Point]) -> None:
    drawn = plots.plot(points, "x", "y", "t")
    assert "nan" not in drawn and "inf" not in drawn
    for x, y in re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', drawn):
        assert 0 <= float(x) <= plots.WIDTH and 0 <= float(y) <= plots.HEIGHT
    assert re.findall(r'class="tick"', drawn)


def test_labels_avoid_each_other() -> None:
    spots = [(200.0, 200.0 + 14 * number) for number in range(6)]
    starts = plots._labels(["anchor(k=10)"] * 6, spots)
    boxes = [(x, y - plots.LINE + 3, x + 12 * plots.LETTER, y + 3) for x, y in starts]
    assert all(plots._overlap(a, b) == 0 for n, a in enumerate(boxes) for b in boxes[:n])
