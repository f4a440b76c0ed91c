"""Questions of the user's own, one JSON object a line: {"image": "a/b.jpg", "question": "...", "answers": ["...", ...]}."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tokensieve.data.vqa_items import QuestionRecord
from tokensieve.data.vqa_layouts.images import ImageFolder, path_inside
from tokensieve.data.vqa_layouts.layout import Contents, Files, Layout, read_lines
from tokensieve.errors import UserError


def read(files: Files) -> Contents:
    if files.questions is None:
        raise UserError(f"--dataset jsonl needs a file: --dataset jsonl:/path/to/questions.jsonl. {LAYOUT.advice}")
    questions = files.find("questions", [])
    folder = questions.parent if files.images is None else files.find("images", [])
    return Contents(read_lines(questions, partial(_parse, folder), LAYOUT.advice), ImageFolder(folder))


def _parse(folder: Path, entry: dict[str, Any], number: int) -> QuestionRecord:
    for name in ("image", "question"):
        if not isinstance(entry.get(name), str):
            raise ValueError(f"it has no {name} (a text)")
    answers = entry.get("answers", entry.get("answer"))
    answers = [answers] if isinstance(answers, (str, int, float)) else answers
    if not isinstance(answers, list) or not all(isinstance(answer, (str, int, float)) for answer in answers):
        raise ValueError("it has no answers (a list of texts) and no answer (a text)")
    inside = path_inside(entry["image"], folder)
    key = str(entry.get("id", entry.get("question_id", number)))
    return QuestionRecord(inside, entry["question"], tuple(map(str, answers)), key, str(entry.get("kind", "")))


LAYOUT = Layout(
    "jsonl",
    'A line is {"image": "a/b.jpg", "question": "...", "answers": ["..."]}, paths from the file or --images.',
    read,
)
