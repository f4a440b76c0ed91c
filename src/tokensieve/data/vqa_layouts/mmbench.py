"""MMBench: multiple choice in one TSV, with the images inside in base64.

    mmbench_dev_20230712.tsv    columns index, question, hint, A, B, C, D, answer, category, l2-category, image

An image cell of a few characters is the index of the row that has the image. Some files repeat every question with its options
rotated, under index + 1000000, + 2000000 and so on. These rows are left out: `VqaData.in_all_rotations` makes them.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from tokensieve.data.vqa_items import LETTERS, QuestionRecord
from tokensieve.data.vqa_layouts.images import EncodedImages
from tokensieve.data.vqa_layouts.layout import Contents, Files, Layout
from tokensieve.errors import UserError

NEEDED = ("index", "question", "A", "B", "image")
FIRST_COPY = 1_000_000  # the index of the first rotated row
LONGEST_REFERENCE = 64  # characters of an image cell that only names another row
EMPTY = ("", "nan", "none")


def read(files: Files) -> Contents:
    if files.images is not None:
        raise UserError(f"mmbench has its images inside the file of the questions: leave --images {files.images} out.")
    usual = []
    if files.questions is None:
        word = files.word()
        usual = [f"mmbench_{word}_20230712.tsv", f"mmbench_{word}_en_20231003.tsv"]
        usual += [f"MMBench_{word.upper()}_EN.tsv", f"MMBench_{word.upper()}_EN_V11.tsv"]
    path = files.find("questions", usual)
    columns, rows = _read_table(path)
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise UserError(f"{path} is not as published: it has no column {', '.join(missing)}.")
    if "answer" not in columns:
        raise files.no_answers(f"file {path.name}")
    by_index = {row["index"]: row for row in rows}
    originals = [row for row in rows if not _is_copy(row["index"], by_index)]
    letters = [letter for letter in LETTERS if letter in columns]
    images: dict[str, str] = {}
    records = []
    for row in originals:
        source = row["image"] if len(row["image"]) <= LONGEST_REFERENCE and row["image"] in by_index else row["index"]
        images[source] = by_index[source]["image"]
        records.append(_record(row, letters, source, path))
    copies = len(rows) - len(originals)
    remarks = [f"{copies} rows repeat questions with rotated options; --circular asks all rotations"] if copies else []
    return Contents(records, EncodedImages(path, images), remarks)


def _read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The names of the columns, and every row by them."""
    limit = csv.field_size_limit(sys.maxsize)  # images are long
    try:
        with path.open(encoding="utf-8", newline="") as file:
            table = csv.DictReader(file, delimiter="\t", restval="")
            return list(table.fieldnames or []), list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path} as a table: {error}.") from error
    finally:
        csv.field_size_limit(limit)


def _is_copy(index: str, by_index: dict[str, dict[str, str]]) -> bool:
    return index.isdigit() and int(index) >= FIRST_COPY and str(int(index) % FIRST_COPY) in by_index


def _record(row: dict[str, str], letters: list[str], image: str, path: Path) -> QuestionRecord:
    choices: list[str] = []
    for letter in letters:
        if _is_empty(row[letter]):
            break
        choices.append(row[letter])
    answer = "" if _is_empty(row["answer"]) else row["answer"].strip().upper()
    if answer and answer not in LETTERS[: len(choices)]:
        raise UserError(f"{path}: question {row['index']} has the answer {row['answer']!r}, and {len(choices)} options.")
    hint = row.get("hint", "")
    question = row["question"] if _is_empty(hint) else f"{hint}\n{row['question']}"
    kind = row.get("l2-category") or row.get("category") or ""
    return QuestionRecord(image, question, (answer,), row["index"], kind, tuple(choices))


def _is_empty(cell: str) -> bool:
    return cell.strip().lower() in EMPTY


LAYOUT = Layout(
    "mmbench",
    "mmbench_dev_20230712.tsv and later versions are linked at https://github.com/open-compass/MMBench; give the file as "
    "--dataset mmbench:FILE, or its folder.",
    read,
    scoring="choice",
    splits={"dev": "dev", "test": "test"},
    unanswered=("test",),
)
