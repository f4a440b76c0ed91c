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
    check_labels(["anchor(k=10)"] * 6, spots, placed=6)


def test_long_labels_of_points_in_one_place_do_not_collide() -> None:
    check_labels(["anchor@2:120 + anchor@4:60(rest=merge)"] * 8, [(300.0 + n, 200.0 - n) for n in range(8)], placed=8)


def test_a_label_without_a_place_is_left_out() -> None:
    texts = ["anchor" * 20, "x"]  # wider than the plot
    assert [label is None for label in plots.labels(texts, [(100.0, 100.0), (200.0, 100.0)])] == [True, False]
    assert "anchor" * 20 not in re.sub("<title>.*?</title>", "", plots.plot([Point(1, 1, None, texts[0], "", "0")], "", "", ""))


def check_labels(texts: list[str], spots: list[tuple[float, float]], placed: int) -> None:
    found = [label for label in plots.labels(texts, spots) if label is not None]
    boxes = [label.box for label in found] + [(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
    assert len(found) == placed
    assert all(plots._overlap(boxes[n], b) == 0 for n in range(len(found)) for b in boxes[n + 1 :])
    assert all(a >= plots.LEFT and c <= plots.WIDTH - plots.RIGHT and b >= 0 for a, b, c, _ in boxes[: len(found)])
