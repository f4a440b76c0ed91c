"""Scores over measured speed-up: what a method reaches at a given speed, read off between measured points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tokensieve.leaderboard.rows import Row

TARGET = 2.0  # the speed-up of the last column
RESIZE = "resize"
Board = tuple[str, str, str, int]  # task, data set, model, samples
Curve = list[tuple[float, float]]  # speed-up, score


def board_of(row: Mapping[str, Any]) -> Board:
    """What rows must share to be compared."""
    return row["task"], row["dataset"], row["model"], row["samples"]


def boards(rows: Sequence[Row]) -> dict[Board, list[Row]]:
    """Rows by task, data set, model and number of samples, in the order in which these appear."""
    found: dict[Board, list[Row]] = {}
    for row in rows:
        found.setdefault(board_of(row), []).append(row)
    return found


def speedup(row: Mapping[str, Any]) -> float:
    """How many times as fast as the full model."""
    return 1 / float(row["time_ratio"])


def curve(rows: Sequence[Row]) -> Curve:
    """The measured points of one method at one placement, with the full model at 1, by speed-up."""
    return sorted([(1.0, rows[0]["score_none"]), *((speedup(row), row["score"]) for row in rows)])


def read_off(points: Curve, at: float) -> float | None:
    """The score at a speed-up on the line between the two points around it; None outside of the measured range."""
    for (left, low), (right, high) in pairwise(points):
        if left <= at <= right:
            return high if right == left else low + (at - left) / (right - left) * (high - low)
    return None


def curves(rows: Sequence[Row]) -> dict[tuple[str, str], Curve]:
    """The curves of one board by method and placement."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["placement"]), []).append(row)
    return {key: curve(found) for key, found in groups.items()}


def resize_curve(rows: Sequence[Row]) -> Curve:
    """The curve of smaller images on one board; empty if there is none."""
    found = [row for row in rows if row["method"] == RESIZE]
    return curve(found) if found else []
