"""What all tasks share."""

from __future__ import annotations

from typing import Any

from tokensieve.tasks.base import Task, once_per_plan


def test_long_work_is_done_once_for_the_records_of_a_plan() -> None:
    class Counting(Task):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        @once_per_plan
        def work(self, records: dict[str, list[Any]]) -> int:
            self.seen.append(records)
            return len(self.seen)

    task, other = Counting(), Counting()
    one: dict[str, list[Any]] = {"test": [1]}
    two: dict[str, list[Any]] = {"test": [1]}  # equal, but of another plan
    assert [task.work(one), task.work(one), task.work(two), task.work(two), task.work(one)] == [1, 1, 2, 2, 3]
    assert other.work(one) == 1 and len(task.seen) == 3
