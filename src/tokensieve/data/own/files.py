"""The image files that arguments name: files, folders, and the user's own data by its prefix. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokensieve.data.own import folders, tables
from tokensieve.errors import UserError, short

CHOICE_ORDER = {"val": 0, "train": 1, "test": 3}  # on which split settings are chosen; others come before test


@dataclass(frozen=True)
class Named:
    """The image files that an argument names, and the split that they are; None: all there are."""

    text: str
    files: list[Path]
    split: str | None = None


def list_files(texts: Iterable[str]) -> list[Path]:
    """The image files among files, folders (with the folders inside), and folder:, images: and csv: names, of all splits.

    A file that is named counts whatever its ending.
    """
    return list(dict.fromkeys(file for text in texts for file in _named(text, of_choice=False).files))


def list_files_of_choice(texts: Iterable[str]) -> list[Named]:
    """As `list_files`, for choosing settings on them: of data with splits only val, or else train, or else the first other.

    The split test is read only where it is alone.
    """
    return [_named(text, of_choice=True) for text in texts]


def _named(text: str, of_choice: bool) -> Named:
    path = Path(text).expanduser()
    split: str | None = None
    if text.startswith(tables.PREFIX) and not path.exists():
        tables.check(text)
        table = tables.read_table(tables.path_of(text))
        if of_choice and (split := split_of_choice(table.splits())) is not None:
            table = table.of_split(split)
        column = table.need("image")
        return Named(text, [Path(table.image_path(row.cells[column])) for row in table.rows], split)
    if text.startswith(folders.PREFIXES) and not path.exists():
        folders.check(text)
        path = folders.path_of(text)
    if path.is_dir():
        if of_choice and (split := split_of_choice(folders.splits_in(path))) is not None:
            path = path / split
        return Named(text, folders.list_images(path).images, split)
    if not path.exists():
        raise UserError(f"--images {short(text, 200)}: there is no such file or folder")
    return Named(text, [path])


def split_of_choice(splits: Sequence[str]) -> str | None:
    """On which of these splits settings are chosen; None if there is none."""
    return min(splits, key=lambda name: CHOICE_ORDER.get(folders.split_of(name) or name, 2), default=None)


def is_own_data(text: str) -> bool:
    """Whether an argument is folder:DIR, images:DIR or csv:FILE, with or without :N, and no file of that name."""
    return text.startswith((tables.PREFIX, *folders.PREFIXES)) and not Path(text).expanduser().exists()


def split_number(text: str) -> tuple[str, int | None]:
    """The data set and the number of a sample in it: folder:PHOTOS:3 is its fourth image."""
    name, _, number = text.rpartition(":")
    if is_own_data(name) and number.isascii() and number.isdigit():
        return name, int(number)
    return text, None


def pick_numbers(text: str, count: int, most: int) -> tuple[str, list[int], str]:
    """Of an argument that names own data with so many samples: the name, the numbers to show, and a remark if not all.

    All of them, but at most `most`; or the one that NAME:N means.
    """
    name, number = split_number(text)
    if number is not None and number >= count:
        raise UserError(f"{short(text, 200)}: there are {short(name, 200)}:0 to {short(name, 200)}:{count - 1}.")
    if number is not None:
        return name, [number], ""
    remark = f"{short(name, 200)}: the first {most} of {count}; {short(name, 200)}:N is another" if count > most else ""
    return name, list(range(min(count, most))), remark
