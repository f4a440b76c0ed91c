"""Questions about videos of the user's own: a folder with the videos, and with a table of the questions (questions.csv)."""

from __future__ import annotations

from tokensieve.data.own import tables
from tokensieve.data.vqa_layouts import table
from tokensieve.data.vqa_layouts.layout import Contents, Files, Layout

TABLE = "questions.csv"


def read(files: Files) -> Contents:
    path = files.find("questions", [TABLE])
    tables.read_table(path).need("video")
    return table.read_rows(files, path)


LAYOUT = Layout(
    "videos",
    f"Put the videos into a folder with a table {TABLE} that has the columns video, question and answer (or answers, separated "
    "by |), and give it as --dataset videos:FOLDER.",
    read,
)
