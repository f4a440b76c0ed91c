"""Properties of the Pareto front, and the choice of the best plan."""

from __future__ import annotations

import math
import random

import pytest

from tokensieve.tuning.front import SLOPE, at_speed, choose, pareto, slope, thin_out

Point = tuple[float, float]  # distance, speed-up


def distance(point: Point) -> float:
    return point[0]


def speed(point: Point) -> float:
    return point[1]


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_what_nothing_beats(seed: int) -> None:
    rng = random.Random(seed)
    points = [(rng.randint(1, 12) / 10, rng.randint(1, 12) / 4) for _ in range(30)]
    front = pareto(points, distance, speed)

    def beats(a: Point, b: Point) -> bool:
        return a != b and a[0] <= b[0] and a[1] >= b[1]

    assert set(front) == {point for point in points if not any(beats(other, point) for other in points)}
    assert len(front) == len(set(front)) and front == sorted(front, key=speed)
    assert [distance(point) for point in front] == sorted(map(distance, front))


def test_the_best_reaches_the_target() -> None:
    points = [(0.1, 1.5), (0.2, 2.0), (0.15, 2.4), (0.5, 3.0)]
    assert choose(points, distance, speed, 2.0) == (0.15, 2.4)
    assert choose(points, distance, speed, None) == (0.1, 1.5)
    assert choose(points, distance, speed, 3.5) is None


def test_the_slope_of_a_power_law() -> None:
    points = [(0.01 * x**4, x) for x in (1.2, 1.6, 2.0, 2.5)]
    assert slope(points, distance, speed) == pytest.approx(4)
    assert slope(points[:2], distance, speed) == SLOPE
    moved = [at_speed(*point, 2.0, 4.0) for point in points]
    assert moved == pytest.approx([math.log(0.01 * 2**4)] * 4)


def test_thinning_keeps_the_ends() -> None:
    points = [(0.01 * x, 1 + x / 10) for x in range(1, 20)]
    thinned = thin_out(points, speed, 4)
    assert len(thinned) == 4 and thinned[0] == points[0] and thinned[-1] == points[-1]
    assert thin_out(points[:2], speed, 4) == points[:2]
