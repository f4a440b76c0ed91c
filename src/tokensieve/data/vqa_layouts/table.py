"""Questions of the user's own in a table (CSV): columns image or video, question, and answer or answers (separated by |)."""

from __future__ import annotations

import os
from pathlib import Path

from tokensieve.data.images import open_photo
from tokensieve.data.own import tables
from tokensieve.data.vqa_items import QuestionRecord
from tokensieve.data.vqa_layouts.images import ImageFolder, VideoFolder
from tokensieve.data.vqa_layouts.layout import Contents, Files, Layout
from tokensieve.errors import UserError

SEPARATOR = "|"  # of several answers


def read(files: Files) -> Contents:
    if files.questions is None:
        raise UserError(f"--dataset csv: needs a file: --dataset csv:/path/to/questions.csv. {LAYOUT.advice}")
    return read_rows(files, files.find("questions", []))


def read_rows(files: Files, path: Path) -> Contents:
    """The questions of a table."""
    folder = path.parent if files.images is None else files.find("images", [])
    table = tables.read_table(path).of_split(files.split) if _has_splits(path) else tables.read_table(path)
    video = table.find("video")
    image, question = table.need("image") if video is None else video, table.need("question")
    kind_of_file = "image" if video is None else "video"
    answers = table.find("answers")
    answer = table.need("answer") if answers is None else answers
    key, kind = table.find("id"), table.find("kind")
    records, problems = [], []
    for row in table.rows:
        given = row.cells[answer].split(SEPARATOR) if answers is not None else [row.cells[answer]]
        if not row.cells[image].strip():
            problems.append(f"line {row.line} has no {kind_of_file}")
        records.append(
            QuestionRecord(
                os.path.normpath(os.path.expanduser(row.cells[image].strip())),
                row.cells[question].strip(),
                tuple(text.strip() for text in given),
                str(row.line) if key is None else row.cells[key].strip(),
                "" if kind is None else row.cells[kind].strip(),
            )
        )
    if problems:
        raise table.error(problems)
    return Contents(records, ImageFolder(folder, open_photo) if video is None else VideoFolder(folder))


def _has_splits(path: Path) -> bool:
    """Whether it has a column of splits; without one it is a split by itself, whichever is asked for."""
    return tables.find_column(tables.header_of(f"{tables.PREFIX}{path}"), "split") is not None


LAYOUT = Layout(
    "csv",
    "It has the columns image (or video), question and answer (or answers, separated by |); paths are from its folder or "
    "--images.",
    read,
)
