"""The leaderboard: files of rows are checked and merged, and shown as a table and as a page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tokensieve.cli import main
from tokensieve.errors import UserError
from tokensieve.leaderboard import curves, markdown
from tokensieve.leaderboard.rows import check_row, file_value, read_folder


def a_row(**changes: Any) -> dict[str, Any]:
    row = {
        "task": "classification",
        "dataset": "embedded",
        "model": "sieve-vit-8",
        "method": "tome",
        "control": False,
        "plan": "tome:-12",
        "placement": "authors",
        "budget": 0.5,
        "tokens_in": 196,
        "tokens_left": 100,
        "metric": "acc1",
        "score": 0.75,
        "score_none": 0.875,
        "difference": -0.125,
        "difference_stderr": 0.01,
        "time_ratio": 0.8,
        "time_ratio_low": 0.79,
        "time_ratio_high": 0.82,
        "oracle_ratio": None,
        "gflops": 1.0,
        "gflops_none": 2.0,
        "samples": 100,
        "seeds": [0],
        "batch_size": 8,
        "rounds": 3,
        "threads": 1,
        "clock": "cpu",
        "versions": {"tokensieve": "0.1.0", "torch": "2.15"},
        "notes": [],
    }
    return row | changes


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text(json.dumps(file_value(rows, [])))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"score": float("nan")}, "score"),
        ({"difference": 0.5}, "score - score_none"),
        ({"samples": 0}, "samples"),
        ({"seeds": []}, "seeds"),
        ({"versions": {}}, "versions"),
        ({"tokens_left": 300}, "tokens_left"),
        ({"time_ratio": 0.1}, "time_ratio"),
        ({"clock": "sundial"}, "clock"),
        ({"plan": ""}, "plan"),
    ],
)
def test_a_wrong_row_is_told(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_row(a_row(**changes), "file.json")


def test_files_are_added_once_and_never_disagree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board, one = tmp_path / "board", write(tmp_path / "one.json", a_row())
    other = write(tmp_path / "other.json", a_row(method="evit", plan="evit:50%", score=0.5, difference=-0.375, time_ratio=0.79))
    assert main(["leaderboard", "add", one, other, "--folder", str(board)]) == 0
    assert "2 rows added" in capsys.readouterr().out
    assert main(["leaderboard", "add", one, "--folder", str(board)]) == 0
    assert "0 rows added" in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in board.iterdir()}
    wrong = write(tmp_path / "wrong.json", a_row(score=0.875, difference=0.0))
    assert main(["leaderboard", "add", wrong, "--folder", str(board)]) == 2
    assert "disagree" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in board.iterdir()} == before
    assert len(read_folder(board)[0]) == 2


def test_the_score_at_twice_the_speed_is_between_measured_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        a_row(time_ratio=1 / 1.5, time_ratio_low=0.6, time_ratio_high=0.7, score=0.875, difference=0.0),
        a_row(budget=0.3, plan="tome:-16", tokens_left=60, time_ratio=0.4, time_ratio_low=0.4, time_ratio_high=0.4),
    ]
    (points,) = curves.curves(rows).values()
    at_two = curves.read_off(points, 2.0)
    assert at_two is not None and 0.75 < at_two < 0.875
    assert curves.read_off(points, 4.0) is None  # not reached
    write(tmp_path / "rows.json", *rows)
    assert main(["leaderboard", "show", "--folder", str(tmp_path)]) == 0
    assert "tome:-16" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["leaderboard", "page", "--folder", str(tmp_path), "--output", str(page)]) == 0
    text = page.read_text()
    assert "tome:-16" in text and "http://" not in text.replace("http://www.w3.org", "") and "<script src" not in text


@pytest.mark.slow
def test_rows_are_really_measured_and_only_missing_ones_are_added(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/leaderboard.py", "--quick", "--limit", "32", "--tasks", "classification"]
    command += ["--methods", "random", "evit", "--rounds", "1", "--batch_size", "2"]
    command += ["--folder", str(tmp_path), "--budgets", "0.5"]

    def run(*more: str) -> list[dict[str, Any]]:
        subprocess.run([*command, *more], cwd=ROOT, check=True, timeout=300, stdout=subprocess.DEVNULL)
        return read_folder(tmp_path)[0]

    rows = run()
    assert {row["method"] for row in rows} == {"random", "evit"}
    assert all(row["samples"] == 32 and row["tokens_left"] < 196 for row in rows)
    more = run("0.3")
    assert {row["budget"] for row in more} == {0.5, 0.3} and len(more) == 2 * len(rows)
    assert [row for row in more if row["budget"] == 0.5] == rows  # the times too, so they were not made again


def test_the_summary_names_the_fastest_that_lose_little_and_the_overview_a_methods_loss() -> None:
    times = {"time_ratio_low": 0.2, "time_ratio_high": 0.9}
    rows = [
        a_row(**times),
        a_row(method="cover", plan="cover:59", budget=0.3, score=0.87, difference=-0.005, time_ratio=0.5, **times),
        a_row(method="cover", plan="cover@4:59", budget=0.3, placement="half", score=0.875, difference=0.0, **times),
        a_row(task="captioning", metric="CIDEr", budget=0.3, score=3.0, score_none=4.0, difference=-1.0, **times),
    ]
    summary = markdown.summary(rows).splitlines()
    assert "| `cover:59` 2.00x | `cover` 87.0 |" in summary[2] and "`tome:-12`" not in summary[2]
    assert summary[3].startswith("| captioning, sieve-vit-8 (CIDEr) | 100 | 4.00 |  |")
    lines = markdown.overview(rows, 0.3).splitlines()
    assert lines[2] == "| `cover` | -0.5 (2.00x) |  |" and lines[3] == "| `tome` |  | -1.00 (1.25x) |"


def test_rows_of_other_numbers_of_samples_are_another_board() -> None:
    rows = [a_row(), a_row(samples=7, method="evit", plan="evit:50%")]
    assert len(curves.boards(rows)) == 2
    text = markdown.tables(rows)
    assert ", 7 samples," in text and text.count("###") == 2
    overview = markdown.overview(rows, 0.5).splitlines()
    assert overview[0] == "| method | classification |" and overview[2].startswith("| `tome` |") and len(overview) == 3


def test_methods_with_the_same_reason_share_a_line() -> None:
    entry = {"task": "classification", "model": "m", "placement": "half"}
    table = markdown.skipped_table(
        [
            entry | {"method": "trim", "reason": "trim@4:16: trim needs the text of each image"},
            entry | {"method": "mmtok", "reason": "mmtok@4:29: mmtok needs the text of each image"},
            entry | {"method": "tome", "reason": "leaves 98 of 196 tokens where 16 are wanted"},
        ]
    )
    assert "`trim`, `mmtok` | needs the text of each image |" in table and table.count("\n") == 3
    assert "does not reach the smaller budgets" in table
