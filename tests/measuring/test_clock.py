"""What counts as time, the spread of ratios, and the warning on a busy machine."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import pytest
import torch

from tokensieve.measuring import clock, results
from tokensieve.measuring.rounds import Ratio, Variant, interleaved, phase_entries, rotated
from tokensieve.measuring.tables import spread

CPU = torch.device("cpu")


def test_waiting_is_wall_time_and_no_cpu_time() -> None:
    took = clock.watch(lambda: time.sleep(0.2), CPU)
    assert took.wall >= 0.2 and took.cpu < 0.2
    assert took.counted(CPU) == took.cpu and took.counted(torch.device("meta")) == took.wall


def test_with_several_threads_cpu_time_would_be_their_sum() -> None:
    assert clock.counts_cpu_time(CPU)
    with clock.torch_threads(2, CPU):
        assert not clock.counts_cpu_time(CPU) and clock.Seconds(2.0, 3.0).counted(CPU) == 2.0
        with clock.torch_threads(None, CPU):
            assert torch.get_num_threads() == 1
        with clock.torch_threads(None, torch.device("cuda")):
            assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1


def test_ratios_are_of_rounds_and_have_quartiles() -> None:
    slow, fast = [2.0, 3.0, 4.0, 10.0], [1.0, 1.0, 1.0, 1.0]
    found = Ratio.of(slow, fast)
    assert found.median == statistics.median(slow) and (found.low, found.high) == (2.75, 5.5)
    assert Ratio.of([2.0], [4.0]) == (0.5, 0.5, 0.5)
    row = found.entries("speedup")
    assert row == {"speedup": 3.5, "speedup_low": 2.75, "speedup_high": 5.5}
    assert spread(row, "speedup") == "3.50x (2.75-5.50)"
    entries = phase_entries("realized", {"first": found, "decode": None})
    assert entries["realized_low"] == {"first": 2.75, "decode": None}
    assert (
        spread(entries, "realized", "first", digits=1, unit="") == "3.5 (2.8-5.5)"
        and spread(entries, "realized", "decode") == ""
    )


def test_every_variant_runs_once_a_round_in_a_rotating_order() -> None:
    assert list(rotated(3, range(3))) == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    ran: list[int] = []
    times = interleaved([Variant(lambda i=i: ran.append(i)) for i in range(2)], CPU, range(2))
    assert ran == [0, 1, 1, 0] and [len(series) for series in times] == [2, 2]


def test_attaching_a_plan_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []

    class Slow:
        def __enter__(self) -> None:
            passed.extend([0] * 100)

        def __exit__(self, *_: Any) -> None:
            passed.extend([0] * 100)

    monkeypatch.setattr(time, "process_time", lambda: float(len(passed)))
    assert Variant(lambda: passed.append(0), Slow()).watch(CPU).cpu == 1


def rows(wall: float, cpu: float, kind: str = "cpu") -> list[dict[str, Any]]:
    return [
        {"clock": kind, "wall_seconds": wall, "seconds": cpu},
        {"clock": kind, "wall_seconds": wall, "seconds": {"total": cpu}},
    ]


@pytest.mark.parametrize(
    ("wall", "kind", "load", "warning"),
    [
        (2.3, "cpu", 0.5, "the machine is busy: wall time is 2.3 times CPU time; compare ratios only"),
        (1.05, "cpu", 9.25, "the machine is busy: the load average is 9.2 on 4 CPUs; compare ratios only"),
        (1.05, "cpu", 4.2, None),
        (2.3, "wall", 1.0, None),
    ],
)
def test_a_busy_machine_is_told(
    wall: float,
    kind: str,
    load: float,
    warning: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    machine = clock.describe_machine(rows(wall, 1.0, kind))
    assert machine["warning"] == warning and machine["load"] == load and machine["cpus"] == 4
    assert machine["wall_per_cpu_second"] == (pytest.approx(wall) if kind == "cpu" else None)
    results.warn(machine)
    assert capsys.readouterr().err == (f"tokensieve: {warning}\n" if warning else "")


def test_a_machine_without_load_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getloadavg")
    machine = clock.describe_machine(rows(1.0, 1.0))
    assert machine["load"] is None and machine["warning"] is None
