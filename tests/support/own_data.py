"""Folders and tables as users have them, with small pictures of one colour."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from tests.support.pictures import CLASSES, picture


def class_folders(
    folder: Path, each: int = 3, classes: Sequence[str] = CLASSES[:3], endings: Sequence[str] = (".png",)
) -> Path:
    """A folder for each class with so many images, with these endings in turn."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            picture(label, 10 * label + number).save(folder / name / f"{number}{endings[number % len(endings)]}")
    return folder


def table(
    path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]], encoding: str = "utf-8", mark: str = ","
) -> Path:
    """A table beside the images."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.writer(file, delimiter=mark)
        writer.writerows([columns, *rows])
    return path
