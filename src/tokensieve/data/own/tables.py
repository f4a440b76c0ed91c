"""Tables of the user's own (CSV): read whole, columns found by their names, problems in one line. Imports no torch.

UTF-8 with or without a byte order mark, or UTF-16 with one; commas, semicolons or tabs between the cells, as in the first line.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokensieve.errors import UserError, one_line, short
from tokensieve.files import open_regular, read_bytes

PREFIX = "csv:"
MAX_BYTES = 1 << 30  # of a table
HEAD = 1 << 16  # bytes that hold the first line
DELIMITERS = (",", ";", "\t")
EXAMPLES = 3  # of every kind of problem are named
ADVICE = "Save it as CSV in UTF-8."
COLUMNS = {  # what a column is: the names that it may have
    "image": ("image", "file", "filename", "filepath", "path", "image_path"),
    "video": ("video", "clip", "video_path"),
    "label": ("label", "class", "category"),
    "caption": ("caption", "text", "title"),
    "question": ("question",),
    "answer": ("answer",),
    "answers": ("answers",),
    "id": ("id", "question_id"),
    "kind": ("kind", "question_type"),
    "split": ("split",),
}


@dataclass(frozen=True)
class Row:
    """A row of a table: the number of its first line, and its cells."""

    line: int
    cells: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table, with the names of its columns as they are written."""

    path: Path
    columns: tuple[str, ...]
    rows: Sequence[Row]

    def find(self, what: str, columns: Mapping[str, Sequence[str]] = COLUMNS) -> int | None:
        """The index of a column by what it is; None if there is none."""
        return find_column(self.columns, what, columns)

    def need(self, what: str, columns: Mapping[str, Sequence[str]] = COLUMNS) -> int:
        """`find`, with a UserError if there is none."""
        found = self.find(what, columns)
        if found is None:
            others = columns[what][1:]
            also = f" (or {', '.join(others)})" if others else ""
            raise UserError(
                f"{short(self.path, 200)} has no column {what}{also}: its first line has {short(', '.join(self.columns), 200)}."
            )
        return found

    def image_path(self, cell: str) -> str:
        """The file that a cell names, from the folder of the table."""
        return os.path.normpath(os.path.join(self.path.parent, os.path.expanduser(cell.strip())))

    def of_split(self, split: str) -> Table:
        """The rows of a split; without a column for it all rows, which are the split "test"."""
        column = self.find("split")
        if column is None:
            if split == "test":
                return self
            raise UserError(
                f"{short(self.path, 200)} has no column split, so it has no split {short(split)!r}: add the column, with "
                "train, val and test, or leave --split out."
            )
        rows = [row for row in self.rows if row.cells[column].strip() == split]
        if not rows:
            there = ", ".join(self.splits())
            raise UserError(f"{short(self.path, 200)} has no row of the split {short(split)!r}: there are {short(there, 200)}.")
        return Table(self.path, self.columns, rows)

    def splits(self) -> list[str]:
        """The names of the splits in the order of their first rows; none without a column for them."""
        column = self.find("split")
        return [] if column is None else list(dict.fromkeys(row.cells[column].strip() for row in self.rows))

    def error(self, problems: Sequence[str]) -> UserError:
        """The error for problems with rows; some of them are told."""
        more = f"; and {len(problems) - EXAMPLES} more" if len(problems) > EXAMPLES else ""
        return UserError(f"{short(self.path, 200)}: {'; '.join(problems[:EXAMPLES])}{more}.")


def path_of(name: str) -> Path:
    """The file that csv:FILE names."""
    return Path(name.removeprefix(PREFIX)).expanduser()


def check(name: str) -> None:
    """A UserError if there is no such table, or if its first line cannot be read."""
    path = path_of(name)
    if name == PREFIX or path.is_dir():
        what = "a folder" if name != PREFIX else "no file"
        raise UserError(f"--dataset {short(name, 200)} names {what}: give a table, for example csv:pairs.csv.")
    if not os.path.exists(path):
        raise UserError(f"--dataset {short(name, 200)}: there is no file {short(path, 200)}.")
    _header(path)


def has_captions(name: str) -> bool:
    return _has(name, "caption") and not _has(name, "label")


def has_questions(name: str) -> bool:
    return _has(name, "question")


def _has(name: str, what: str) -> bool:
    return find_column(header_of(name), what) is not None


def header_of(name: str) -> tuple[str, ...]:
    """The columns of csv:FILE; none if it cannot be read."""
    try:
        return _header(path_of(name))
    except UserError:
        return ()


def find_column(columns: Sequence[str], what: str, known: Mapping[str, Sequence[str]] = COLUMNS) -> int | None:
    """The index of a column by what it is; None if there is none."""
    written = [column.strip().lower() for column in columns]
    return next((written.index(name.lower()) for name in known[what] if name.lower() in written), None)


def read_table(path: Path) -> Table:
    """A table with at least one row; a UserError with the lines that are wrong."""
    text = _decode(path, read_bytes(path, MAX_BYTES))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
    rows: list[Row] = []
    columns: tuple[str, ...] | None = None
    problems: list[str] = []
    line = 1
    try:
        for cells in reader:
            first, line = line, reader.line_num + 1
            if not any(map(str.strip, cells)):
                continue
            if columns is None:
                columns = _checked_columns(path, cells)
            elif len(cells) != len(columns):
                problems.append(f"line {first} has {len(cells)} cells, the first line has {len(columns)}")
            elif any("\0" in cell for cell in cells):
                problems.append(f"line {first} has a NUL character")
            else:
                rows.append(Row(first, cells))
    except csv.Error as error:
        raise UserError(f"{short(path, 200)}: line {line}: {_reason(error)}.") from None
    table = Table(path, columns or _checked_columns(path, ()), rows)
    if problems:
        raise table.error([f"{problem} (put text with commas in quotes)" for problem in problems])
    if not rows:
        raise UserError(f"{short(path, 200)} has no row below its first line.")
    return table


def _reason(error: csv.Error) -> str:
    text = one_line(error, 100)
    if "limit" in text:
        return f"a cell has more than {csv.field_size_limit():,} characters; is a quote not closed"
    return f"{text}; is a quote not closed" if "end of data" in text else text


def _header(path: Path) -> tuple[str, ...]:
    with open_regular(path) as (file, _):
        content = file.read(HEAD)
    text = _decode(path, content, whole=len(content) < HEAD)
    try:
        cells = next(
            (cells for cells in csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text)) if any(cells)), []
        )
    except csv.Error as error:
        raise UserError(f"{short(path, 200)}: line 1: {_reason(error)}.") from None
    return _checked_columns(path, cells)


def _checked_columns(path: Path, cells: Sequence[str]) -> tuple[str, ...]:
    columns = tuple(cell.strip() for cell in cells)
    if not any(columns):
        raise UserError(f"{short(path, 200)} is empty: its first line has to name the columns, for example image,label.")
    twice = next((column for column in columns if column and columns.count(column) > 1), None)
    if twice is not None:
        raise UserError(f"{short(path, 200)} has two columns {short(twice)!r}: rename one of them.")
    return columns


def _decode(path: Path, content: bytes, whole: bool = True) -> str:
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    decoder = codecs.getincrementaldecoder("utf-16" if wide else "utf-8-sig")()
    try:
        return decoder.decode(content, final=whole)
    except UnicodeDecodeError as error:
        raise UserError(f"{short(path, 200)} is not text in UTF-8 ({one_line(error, 100)}). {ADVICE}") from None


def _delimiter(text: str) -> str:
    """What stands between the names of the columns."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    return max(DELIMITERS, key=first.count)
