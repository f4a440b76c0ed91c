"""VQAv2: questions and annotations in two files, ten answers to every question, images of COCO.

v2_OpenEnded_mscoco_val2014_questions.json      {"questions": [{"question_id", "image_id", "question"}, ...]}
v2_mscoco_val2014_annotations.json              {"annotations": [{"question_id", "answer_type", "answers": [{"answer"}, ...]}]}
val2014/COCO_val2014_%012d.jpg
"""

from __future__ import annotations

import re

from tokensieve.data.vqa_items import QuestionRecord
from tokensieve.data.vqa_layouts.images import ImageFolder
from tokensieve.data.vqa_layouts.layout import Contents, Files, Layout, few, read_entries, read_json
from tokensieve.errors import UserError


def read(files: Files) -> Contents:
    subset = "" if files.questions is not None else files.word()
    name = f"v2_OpenEnded_mscoco_{subset}_questions.json"
    questions = files.find("questions", [name, f"questions/{name}"])
    content = read_json(questions)
    in_file = content.get("data_subtype") if isinstance(content, dict) else None
    in_name = re.search(r"(train|val|test)\d{4}", questions.name)
    subset = (
        in_file if isinstance(in_file, str) else in_name[0] if in_name else files.layout.splits.get(files.split, files.split)
    )
    entries = read_entries(content, "questions", questions, ("image_id", "question", "question_id"))
    if subset.startswith("test") and files.annotations is None:
        raise files.no_answers(f"file {questions.name}")
    name = f"v2_mscoco_{subset}_annotations.json"
    annotations = files.find("annotations", [name, f"annotations/{name}"], questions)
    folder = files.find("images", [subset, f"images/{subset}", "images", "."], questions)
    folder = folder / subset if (folder / subset).is_dir() else folder
    annotated = {
        entry["question_id"]: entry
        for entry in read_entries(read_json(annotations), "annotations", annotations, ("question_id", "answers"))
    }
    records = []
    for entry in entries:
        annotation = annotated.get(entry["question_id"], {})
        try:
            people = tuple(str(person["answer"]) for person in annotation.get("answers", ()))
            file = f"COCO_{subset}_{int(entry['image_id']):012d}.jpg"
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(f"question {entry['question_id']} of {questions} is not as published: {error!r}.") from error
        kind = str(annotation.get("answer_type", ""))
        records.append(QuestionRecord(file, str(entry["question"]), people, str(entry["question_id"]), kind))
    unused = sorted(map(str, annotated.keys() - {entry["question_id"] for entry in entries}))
    remarks = [f"{len(unused)} annotations have no question: {few(unused)}"] if unused else []
    return Contents(records, ImageFolder(folder), remarks)


LAYOUT = Layout(
    "vqav2",
    "Questions and annotations are at https://visualqa.org/download.html, images (train2014.zip, val2014.zip) at "
    "https://cocodataset.org/#download; unpack them into one folder and give it as --dataset vqav2:FOLDER, or the files by "
    "--questions, --annotations and --images.",
    read,
    splits={"train": "train2014", "val": "val2014", "test": "test2015", "test-dev": "test2015"},
    unanswered=("test", "test-dev"),
    has_annotations=True,
)
