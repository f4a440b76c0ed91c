"""Class names: matched by name where they can be, else in order; never silently wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokensieve.data.own.classes import name_classes, read_classes, sort_words
from tokensieve.errors import UserError


@pytest.mark.parametrize(
    ("found", "given", "names", "numbers"),
    [
        (["big_cat", "dog"], [], ["big cat", "dog"], [0, 1]),
        (["cat", "dog"], ["dog", "cat"], ["dog", "cat"], [1, 0]),  # by name, whatever the order
        (["cat", "dog"], ["Dog", "emu", "CAT"], ["Dog", "emu", "CAT"], [2, 0]),  # emu is a class without images
        (["n01", "n02"], ["cat", "dog"], ["cat", "dog"], [0, 1]),  # in order
        (["0", "2"], ["a", "b", "c"], ["a", "b", "c"], [0, 2]),  # numbers by value
    ],
)
def test_names(found: list[str], given: list[str], names: list[str], numbers: list[int]) -> None:
    assert name_classes(found, given, "data") == (names, numbers)


@pytest.mark.parametrize(
    ("found", "given", "message"),
    [
        (["cat", "dog"], ["cat", "emu"], "the class 'dog' is not among the class names cat, emu"),
        (["n01", "n02"], ["a", "b", "c"], r"3 class names for 2 classes \(n01, n02\), and none of them"),
        (["1", "2"], ["a", "b"], "the labels go from 1 to 2, and 2 class names are for 0 to 1"),
        (["a", "b"], ["x", "x"], "the class name 'x' comes twice"),
    ],
)
def test_names_that_do_not_fit(found: list[str], given: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        name_classes(found, given, "data")


def test_the_order_of_words() -> None:
    assert sort_words(["10", "9", "10", "0"]) == ["0", "9", "10"]
    assert sort_words(["b", "10", "a", "9"]) == ["10", "9", "a", "b"]


def test_a_file_of_class_names(tmp_path: Path) -> None:
    assert read_classes(tmp_path, ["a", "b"]) == []
    file = tmp_path / "classes.txt"
    file.write_text("\ufeffred cat\n\nblue dog\n", encoding="utf-8")
    assert read_classes(tmp_path, ["a", "b"]) == ["red cat", "blue dog"]
    file.write_text("c\temu\nb\tblue dog\na\tred cat\n")
    assert read_classes(tmp_path, ["a", "b"]) == ["red cat", "blue dog", "emu"]
    file.write_text("a\tred cat\nblue dog\n")
    with pytest.raises(UserError, match="every line or none has a tab"):
        read_classes(tmp_path, ["a", "b"])
    file.write_text("a\tred cat\n")
    with pytest.raises(UserError, match="no name for the class 'b'"):
        read_classes(tmp_path, ["a", "b"])
