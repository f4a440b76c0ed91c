"""The record of a search: it goes on after a kill, and is of one model and one set of images."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokensieve.errors import UserError
from tokensieve.tuning.study import Measured, Record, Trial

ABOUT = {"model": "a", "images": "b"}


def row(plan: str) -> Trial:
    return Trial(plan, {"side": 4, "method": "cover", "position": "1", "options": []}, 2.0, 2.1, 0.5, 0.1, 1.0, 4)


def test_a_killed_search_goes_on(tmp_path: Path) -> None:
    record = Record(tmp_path, ABOUT, {"speedup": 2}, 0)
    record.enqueue([{"x": 1}, {"x": 2}])
    for number in range(2):
        trial = record.ask()
        assert trial.suggest_int("x", 0, 5) == number + 1
        record.add(trial, [0.5, 2.0], row(f"cover@1:{number + 1}"))
    record.ask()  # under way when the process is killed
    assert record.remember("n_images", lambda: 7) == 7
    measured = Measured("cover@1:2", "search", {}, 2.0, 2.0, 2.1, 1.0, 2.0, 0.1, 2, {"distance": [0.25, 0.5]}, [])
    record.add_measured(measured, 0.375)
    again = Record(tmp_path, ABOUT, {"speedup": 2}, 0)
    again.enqueue([{"x": 1}])  # not a second time
    assert again.trials == [row("cover@1:1"), row("cover@1:2")] and again.rows == [measured]
    assert again.remember("n_images", lambda: 8) == 7
    assert again.seconds >= 0 and again.ask().number == 3
    other = Record(tmp_path, ABOUT, {"speedup": 3}, 0)
    assert other.trials == [] and other.rows == []


def test_a_folder_is_of_one_model_and_one_set_of_images(tmp_path: Path) -> None:
    Record(tmp_path, ABOUT, {}, 0).claim("weights", "w")
    with pytest.raises(UserError, match="another images; give another folder with --output"):
        Record(tmp_path, {"model": "a", "images": "c"}, {"speedup": 3}, 0)
    with pytest.raises(UserError, match="another weights"):
        Record(tmp_path, ABOUT, {}, 0).claim("weights", "v")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "study.db").write_text("this is not a database, it is a long text" * 10)
    with pytest.raises(UserError, match="cannot be opened"):
        Record(tmp_path / "damaged", ABOUT, {}, 0)
