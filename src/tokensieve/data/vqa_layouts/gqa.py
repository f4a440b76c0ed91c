"""GQA: one file of questions by their ids, one answer to each.

testdev_balanced_questions.json     {"201307251": {"imageId": "n161313", "question": "...", "answer": "...", "types": {...}}}
images/<imageId>.jpg
"""

from __future__ import annotations

import re

from tokensieve.data.vqa_items import QuestionRecord
from tokensieve.data.vqa_layouts.images import ImageFolder
from tokensieve.data.vqa_layouts.layout import Contents, Files, Layout, check_keys, read_json
from tokensieve.errors import UserError

_HINT = " GQA's test and challenge splits have no answers: give those of val or testdev."


def read(files: Files) -> Contents:
    name = f"{'' if files.questions is not None else files.word()}_questions.json"
    questions = files.find("questions", [name, f"questions1.2/{name}", f"questions/{name}"])
    folder = files.find("images", ["images", "."], questions)
    content = read_json(questions)
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise files.error(f"{questions} is not as published: it is not a table of questions by their ids.")
    records = []
    for key, entry in content.items():
        check_keys(entry, ("imageId", "question", "answer"), f"{questions}: question {key}", _HINT)
        image = str(entry["imageId"])
        if not re.fullmatch(r"[\w-]+", image):
            raise UserError(f"{questions}: question {key} names the image {image!r}, which is no id of GQA.")
        kinds = entry.get("types")
        kind = str(kinds.get("structural") or "") if isinstance(kinds, dict) else ""
        records.append(QuestionRecord(f"{image}.jpg", str(entry["question"]), (str(entry["answer"]),), str(key), kind))
    return Contents(records, ImageFolder(folder))


LAYOUT = Layout(
    "gqa",
    "Questions (questions1.2.zip) and images are at https://cs.stanford.edu/people/dorarad/gqa/download.html; "
    "unpack them into one folder and give it as --dataset gqa:FOLDER, or the files by --questions and --images.",
    read,
    splits={"train": "train_balanced", "val": "val_balanced", "testdev": "testdev_balanced", "test": "test_balanced"},
    unanswered=("test",),
    shares_images=True,
)
