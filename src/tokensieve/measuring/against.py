"""`tokensieve bench --against FILE`: which plans became slower or faster since an earlier bench.

Rows are matched by model, plan and batch size. Speed-ups are compared, because they are ratios within one run: a machine that
is busy, or another one, changes them less than seconds. A change counts if the quartiles of both runs do not overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokensieve import files
from tokensieve.errors import UserError, short

LEAST_SPREAD = 0.02  # of a ratio: what few rounds, or a file without quartiles, are at least trusted to
LARGEST = 1e9  # a ratio of times is less
PHASES = ("first", "decode")  # of a vision-language model: what is compared
Key = tuple[str, str, int]  # model, plan, batch size


@dataclass(frozen=True)
class Change:
    """A speed-up before and now."""

    key: Key
    phase: str  # of a vision-language model
    before: float
    now: float

    def __str__(self) -> str:
        return f"{name(self.key)}{self.phase and f', {self.phase}'}: {self.before:.2f}x, now {self.now:.2f}x"


@dataclass
class Comparison:
    """What changed between two benches."""

    slower: list[Change] = field(default_factory=list)
    faster: list[Change] = field(default_factory=list)
    same: int = 0  # rows without a change
    missing: list[Key] = field(default_factory=list)  # in the file, not measured now
    new: list[Key] = field(default_factory=list)  # not in the file


def name(key: Key) -> str:
    """A row as it is printed."""
    model, plan, batch_size = (short(part, 120) for part in key)
    return f"{model}, {plan}, batch {batch_size}"


def read(path: str) -> list[dict[str, Any]]:
    """The rows of a file that `tokensieve bench --output` wrote; a UserError for any other file."""
    found = files.read_json(path)
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not rows or not all(map(_is_row, rows)):
        raise UserError(f"--against {short(path, 200)}: this is no result of tokensieve bench; give a file of bench --output")
    return rows


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("model", "plan")):
        return False
    speedup = row.get("speedup")
    numbers = [number for number in speedup.values() if number is not None] if isinstance(speedup, dict) else [speedup]
    return type(row.get("batch_size")) is int and all(_number(number) is not None for number in numbers)


def _number(value: Any) -> float | None:
    """A ratio of times; None for anything that is none."""
    return float(value) if type(value) in (int, float) and 0 < value < LARGEST else None


def compare(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Comparison:
    """What changed from one bench to another."""
    old, current = ({(row["model"], row["plan"], row["batch_size"]): row for row in rows} for rows in (before, now))
    found = Comparison(missing=[key for key in old if key not in current], new=[key for key in current if key not in old])
    for key in (key for key in current if key in old):
        changes = 0
        for phase in PHASES if isinstance(current[key]["speedup"], Mapping) else ("",):
            then, today = (_range(rows[key], phase) for rows in (old, current))
            if then is None or today is None or (today[0] <= then[2] and today[2] >= then[0]):
                continue
            changes += 1
            (found.slower if today[1] < then[1] else found.faster).append(Change(key, phase, then[1], today[1]))
        found.same += not changes
    return found


def _range(row: Mapping[str, Any], phase: str) -> tuple[float, float, float] | None:
    """The lower quartile, the median and the upper quartile of a speed-up; None if it was not measured."""
    low, middle, high = (_phase(row.get(f"speedup{end}"), phase) for end in ("_low", "", "_high"))
    if middle is None:
        return None
    below, above = middle * (1 - LEAST_SPREAD), middle * (1 + LEAST_SPREAD)
    return min(below, middle if low is None else low), middle, max(above, middle if high is None else high)


def _phase(value: Any, phase: str) -> float | None:
    return _number(value.get(phase) if isinstance(value, Mapping) else value)


def print_comparison(path: str, found: Comparison) -> None:
    """One line for each change and each row that only one bench has, and a summary."""
    for title, changes in (("slower", found.slower), ("faster", found.faster)):
        for change in sorted(changes, key=lambda change: change.now / change.before, reverse=title == "faster"):
            print(f"{title}: {change}")
    for title, keys in (("missing", found.missing), ("new", found.new)):
        for key in keys:
            print(f"{title}: {name(key)}")
    changed = f"{len(found.slower)} slower, {len(found.faster)} faster"
    others = f"{len(found.missing)} rows missing, {len(found.new)} new"
    print(f"against {short(path, 200)}: {changed}, {found.same} rows the same, {others}")
