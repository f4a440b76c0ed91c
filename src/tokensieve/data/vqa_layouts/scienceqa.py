"""ScienceQA, the questions with an image (ScienceQA-IMG): multiple choice, with a hint before some questions.

problems.json       {"11": {"question", "choices": [...], "answer": 0, "hint", "image": "image.png" or null, ...}}
pid_splits.json     {"test": ["11", ...], "minitest": [...], ...}
images/<split>/<id>/image.png
"""

from __future__ import annotations

from typing import Any

from tokensieve.data.vqa_items import LETTERS, QuestionRecord
from tokensieve.data.vqa_layouts.images import ImageFolder, path_inside
from tokensieve.data.vqa_layouts.layout import Contents, Files, Layout, check_keys, read_json
from tokensieve.errors import UserError

NEEDED = ("question", "choices", "answer", "image")


def read(files: Files) -> Contents:
    split = files.word()
    problems_file = files.find("questions", ["problems.json", "data/scienceqa/problems.json"])
    splits_file = problems_file.with_name("pid_splits.json")
    if not splits_file.exists():
        raise files.error(f"there is no {splits_file}, which says which questions are of the split.")
    problems, splits = read_json(problems_file), read_json(splits_file)
    if not isinstance(problems, dict):
        raise files.error(f"{problems_file} is not as published: it is not a table of questions by their ids.")
    check_keys(splits, (split,), str(splits_file))
    folder = files.find("images", ["images", "."], problems_file)
    records, without_image = [], 0
    for key in map(str, splits[split]):
        where = f"{problems_file}: question {key}"
        if key not in problems:
            raise UserError(f"{where} is missing, but {splits_file.name} has it in {split}.")
        problem = problems[key]
        check_keys(problem, NEEDED, where)
        if not problem["image"]:
            without_image += 1
            continue
        inside = f"{key}/{problem['image']}"
        own_split = str(problem.get("split", split))  # minitest is a part of test
        if (folder / own_split).is_dir():
            inside = f"{own_split}/{inside}"
        try:
            records.append(_record(key, problem, path_inside(inside, folder)))
        except ValueError as error:
            raise UserError(f"{where} is not as published: {error}.") from error
    if not records and without_image:
        raise UserError(f"scienceqa ({split}): none of its {without_image} questions has an image.")
    return Contents(records, ImageFolder(folder))


def _record(key: str, problem: dict[str, Any], file: str) -> QuestionRecord:
    choices, answer = problem["choices"], problem["answer"]
    if not isinstance(choices, list) or not 0 < len(choices) <= len(LETTERS):
        raise ValueError("its choices are not a list of texts")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ValueError(f"its answer {answer!r} is not the number of one of its {len(choices)} choices")
    hint = str(problem.get("hint") or "").strip()
    question = f"Context: {hint}\n{problem['question']}" if hint else str(problem["question"])
    subject = str(problem.get("subject", ""))
    return QuestionRecord(file, question, (LETTERS[answer],), key, subject, tuple(map(str, choices)))


LAYOUT = Layout(
    "scienceqa",
    "problems.json and pid_splits.json are in data/scienceqa of https://github.com/lupantech/ScienceQA, images (test.zip) are "
    "linked there; put them into one folder and give it as --dataset scienceqa:FOLDER, or problems.json by --questions and the "
    "folder of the images by --images.",
    read,
    scoring="choice",
    splits={name: name for name in ("train", "val", "test", "trainval", "minitrain", "minival", "minitest")},
)
