"""The image files that arguments name: files, folders, and the user's own data by its prefix. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokensieve.data.own import folders, tables
from tokensieve.errors import UserError, short


def list_files(texts: Iterable[str]) -> list[Path]:
    """The image files among files, folders (with the folders inside), and folder:, images: and csv: names.

    A file that is named counts whatever its ending.
    """
    found: dict[Path, None] = {}
    for text in texts:
        path = Path(text).expanduser()
        if text.startswith(tables.PREFIX) and not path.exists():
            tables.check(text)
            table = tables.read_table(tables.path_of(text))
            column = table.need("image")
            found |= dict.fromkeys(Path(table.image_path(row.cells[column])) for row in table.rows)
            continue
        if text.startswith(folders.PREFIXES) and not path.exists():
            folders.check(text)
            path = folders.path_of(text)
        if path.is_dir():
            found |= dict.fromkeys(folders.list_images(path).images)
        elif path.exists():
            found[path] = None
        else:
            raise UserError(f"--images {short(text, 200)}: there is no such file or folder")
    return list(found)


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
