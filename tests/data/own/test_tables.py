"""Tables of the user's own: encodings, delimiters, columns by name; one clear line for each mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.own_data import table
from tokensieve.data.own import tables
from tokensieve.errors import UserError


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_encodings_and_delimiters(tmp_path: Path, encoding: str, mark: str) -> None:
    path = table(tmp_path / "t.csv", ["Image ", "CAPTION"], [["ü.png", 'a "red, big; cat"\nand a dog 猫']], encoding, mark)
    read = tables.read_table(path)
    assert read.columns == ("Image", "CAPTION") and read.need("image") == 0 and read.need("caption") == 1
    assert list(read.rows[0].cells) == ["ü.png", 'a "red, big; cat"\nand a dog 猫'] and read.rows[0].line == 2
    assert tables.header_of(f"csv:{path}") == read.columns


def test_what_a_table_holds(tmp_path: Path) -> None:
    for columns, captions, questions in (
        (["filepath", "title"], True, False),
        (["image", "caption", "label"], False, False),
        (["image", "question", "answer"], False, True),
        (["image", "label"], False, False),
    ):
        name = f"csv:{table(tmp_path / 't.csv', columns, [['x'] * len(columns)])}"
        assert (tables.has_captions(name), tables.has_questions(name)) == (captions, questions)
    assert not tables.has_captions("csv:nowhere.csv")


def test_the_header_of_a_long_table_may_end_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("image,caption\n" + "a.png,猫猫猫\n" * 20000, encoding="utf-8")
    for head in range(100, 110):  # within a letter of several bytes
        tables.HEAD, kept = head, tables.HEAD
        try:
            assert tables.header_of(f"csv:{path}") == ("image", "caption")
        finally:
            tables.HEAD = kept


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty: its first line has to name the columns"),
        ("\n\n", "is empty: its first line has to name the columns"),
        ("image,label\n", "has no row below its first line"),
        ("image,image\na,b\n", "has two columns 'image'"),
        ("image,label\na,b,c\n\nd\n", "line 2 has 3 cells, the first line has 2.*; line 4 has 1 cells"),
        ('image,label\na,"b\n' + "x\n" * 10, "line 2: unexpected end of data; is a quote not closed"),
        ("image,label\na," + "b" * 200_000 + "\n", "line 2: a cell has more than 131,072 characters; is a quote not closed"),
        ("image,label\na\0,b\n", "line 2 has a NUL character|line contains NUL"),
    ],
)
def test_wrong_tables_are_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        tables.read_table(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_other_encodings_say_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("image,caption\na.png,草地上的小猫\n".encode("gb18030"))
    with pytest.raises(UserError, match=r"t.csv is not text in UTF-8 .* Save it as CSV in UTF-8"):
        tables.read_table(path)


def test_what_is_no_table(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for name, message in (
        ("csv:", "names no file"),
        (f"csv:{tmp_path}", "names a folder"),
        (f"csv:{tmp_path}/none.csv", "there is no file"),
        (f"csv:{tmp_path}/pipe.csv", "not a regular file"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            tables.check(name)
        assert "network" not in str(caught.value)


def test_splits(tmp_path: Path) -> None:
    read = tables.read_table(table(tmp_path / "t.csv", ["image", "split"], [["a", "train"], ["b", "test"], ["c", "train"]]))
    assert [row.cells[0] for row in read.of_split("train").rows] == ["a", "c"]
    with pytest.raises(UserError, match="no row of the split 'val': there are train, test"):
        read.of_split("val")
    plain = tables.read_table(table(tmp_path / "u.csv", ["image"], [["a"]]))
    assert plain.of_split("test") is plain
    with pytest.raises(UserError, match="has no column split, so it has no split 'train'"):
        plain.of_split("train")


def test_paths_are_from_the_folder_of_the_table(tmp_path: Path) -> None:
    read = tables.read_table(table(tmp_path / "in" / "t.csv", ["image"], [["a"]]))
    assert read.image_path(" x/../y.png ") == str(tmp_path / "in" / "y.png")
    assert read.image_path("/a/b.png") == "/a/b.png"
