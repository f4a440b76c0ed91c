"""Choosing among plans: the Pareto front of distance and speed-up, and the best plan at a given speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
Key = Callable[[T], float]
SLOPE = 3.0  # how log(distance) grows with log(speed-up), where a front does not tell


def pareto(rows: Sequence[T], distance: Key[T], speedup: Key[T]) -> list[T]:
    """Those that no other beats: nothing is as fast and nearer, nothing is as near and faster. The slowest first."""
    best: list[T] = []
    for row in sorted(rows, key=lambda row: (-speedup(row), distance(row))):
        if not best or distance(row) < distance(best[-1]):
            best.append(row)
    return best[::-1]


def slope(rows: Sequence[T], distance: Key[T], speedup: Key[T]) -> float:
    """d log(distance) / d log(speed-up) along the front of these rows."""
    points = [(math.log(speedup(row)), _log(distance(row))) for row in pareto(rows, distance, speedup)]
    if len(points) < 3:
        return SLOPE
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread < 1e-4:
        return SLOPE
    return max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)


def at_speed(distance: float, speedup: float, target: float, steepness: float) -> float:
    """log(distance) that a row would have at the target speed-up, by the slope of the front."""
    return _log(distance) + steepness * (math.log(target) - math.log(speedup))


def choose(rows: Sequence[T], distance: Key[T], speedup: Key[T], target: float | None) -> T | None:
    """The nearest to the full model of those that reach the target; None if none does. No target: the nearest."""
    reaching = [row for row in rows if target is None or speedup(row) >= target]
    return min(reaching, key=distance, default=None)


def thin_out(front: Sequence[T], speedup: Key[T], count: int) -> list[T]:
    """At most so many rows of a front, spread over its speed-ups in equal ratios."""
    if len(front) <= count:
        return list(front)
    low, high = (math.log(speedup(row)) for row in (front[0], front[-1]))
    wanted = [low + (high - low) * number / max(1, count - 1) for number in range(count)]
    nearest = [min(range(len(front)), key=lambda i: abs(math.log(speedup(front[i])) - at)) for at in wanted]
    return [front[number] for number in dict.fromkeys(nearest)]


def _log(distance: float) -> float:
    return math.log(max(distance, 1e-9))
