"""TextVQA: one file with questions and ten answers to each, images of Open Images.

TextVQA_0.5.1_val.json      {"data": [{"question_id", "image_id", "question", "answers": [ten texts]}, ...]}
train_images/<image_id>.jpg (those of the training and of the validation split)
"""

from __future__ import annotations

import re

from tokensieve.data.vqa_items import QuestionRecord
from tokensieve.data.vqa_layouts.images import ImageFolder
from tokensieve.data.vqa_layouts.layout import Contents, Files, Layout, read_entries, read_json
from tokensieve.errors import UserError


def read(files: Files) -> Contents:
    name = f"TextVQA_0.5.1_{'' if files.questions is not None else files.word()}.json"
    questions = files.find("questions", [name, f"annotations/{name}"])
    folder = files.find("images", ["train_images", "images/train_images", "images", "."], questions)
    records = []
    entries = read_entries(read_json(questions), "data", questions, ("question_id", "image_id", "question"))
    if entries and not any("answers" in entry for entry in entries):
        raise files.no_answers(f"file {questions.name}")
    for entry in entries:
        image, key, answers = str(entry["image_id"]), str(entry["question_id"]), entry.get("answers")
        if not re.fullmatch(r"[\w-]+", image):
            raise UserError(f"{questions}: question {key} names the image {image!r}, which is no id of TextVQA.")
        if not isinstance(answers, list):
            raise UserError(f"{questions}: question {key} has no answers (a list of texts).")
        records.append(QuestionRecord(f"{image}.jpg", str(entry["question"]), tuple(map(str, answers)), key, ""))
    return Contents(records, ImageFolder(folder))


LAYOUT = Layout(
    "textvqa",
    "TextVQA_0.5.1_val.json and the images (train_val_images.zip) are at https://textvqa.org/dataset; unpack them into one "
    "folder and give it as --dataset textvqa:FOLDER, or the files by --questions and --images.",
    read,
    splits={"train": "train", "val": "val", "test": "test"},
    unanswered=("test",),
    shares_images=True,
)
