"""Questions in a table: read by name or by the file that a training names, with splits, and checked like all questions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.own_data import class_folders, table
from tokensieve.data import registry, vqa
from tokensieve.errors import UserError

COLUMNS = ["image", "question", "answers", "split", "kind"]
ROWS = [
    ["a/red/0.png", "what colour?", "red| crimson", "train", "colour"],
    ["a/blue/0.png", "what colour?", "blue", "val", "colour"],
    ["a/blue/1.png", "is it red?", "no", "train", "yes/no"],
]


def test_questions_and_their_splits(tmp_path: Path) -> None:
    class_folders(tmp_path / "a")
    path = table(tmp_path / "q.csv", COLUMNS, ROWS)
    assert registry.contents_of(f"csv:{path}") == "questions" and registry.task_of(f"csv:{path}") == "vqa"
    train, val = vqa.load(f"csv:{path}", split="train"), vqa.load("csv", questions=path, split="val")
    assert [item.question for item in train] == ["what colour?", "is it red?"] and len(val) == 1  # type: ignore[attr-defined]
    assert train[0].answers == ["red", "crimson"] and train[0].kind == "colour" and train[0].image.size == (40, 48)
    assert train.fingerprint != val.fingerprint
    with pytest.raises(UserError, match="no row of the split 'test': there are train, val"):
        vqa.load(f"csv:{path}")


def test_a_table_without_splits_is_any_split(tmp_path: Path) -> None:
    class_folders(tmp_path / "a")
    path = table(tmp_path / "q.csv", ["image", "question", "answer"], [[row[0], row[1], row[2]] for row in ROWS])
    assert len(vqa.load(f"csv:{path}", split="train")) == len(vqa.load(f"csv:{path}")) == 3
    assert vqa.load(f"csv:{path}", limit=2)[0].answers == ["red| crimson"]


def test_questions_are_checked(tmp_path: Path) -> None:
    class_folders(tmp_path / "a")
    rows = [
        ["a/red/0.png", "what?", "red"],
        ["a/none.png", "what?", "red"],
        ["a/red/1.png", "", "red"],
        ["a/red/2.png", "x", ""],
    ]
    data = vqa.load(f"csv:{table(tmp_path / 'q.csv', ['image', 'question', 'answer'], rows)}")
    with pytest.raises(UserError, match=r"1 of 4 questions have no image.*no answer.*no question"):
        data.check()
    for columns, message in (
        (["image", "question"], "no column answer"),
        (["question", "answer"], r"no column image \(or file"),
    ):
        with pytest.raises(UserError, match=message):
            vqa.load(f"csv:{table(tmp_path / 'r.csv', columns, [['x'] * len(columns)])}")
