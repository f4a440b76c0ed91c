"""POPE: is an object in the image, yes or no? Three files (random, popular, adversarial objects), one JSON object a line.

coco_pope_random.json       {"question_id": 1, "image": "COCO_val2014_000000016631.jpg", "text": "...", "label": "yes"}
val2014/COCO_val2014_%012d.jpg
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from tokensieve.data.vqa_items import QuestionRecord
from tokensieve.data.vqa_layouts.images import ImageFolder, path_inside
from tokensieve.data.vqa_layouts.layout import Contents, Files, Layout, read_lines

SUBSETS = ("random", "popular", "adversarial")


def read(files: Files) -> Contents:
    if files.questions is not None:
        file = files.find("questions", [])
        subset = re.search("|".join(SUBSETS), file.name)
        found = {subset[0] if subset else "": file}
    else:
        subsets = SUBSETS if files.word() == "all" else (files.word(),)
        found = {name: files.find("questions", _usual(name)) for name in subsets}
    folder = files.find("images", ["val2014", "images/val2014", "images", "."], next(iter(found.values())))
    records: list[QuestionRecord] = []
    for subset_name, path in found.items():
        records += read_lines(path, partial(_parse, subset_name, folder), LAYOUT.advice)
    return Contents(records, ImageFolder(folder))


def _usual(subset: str) -> list[str]:
    name = f"coco_pope_{subset}.json"
    return [name, f"coco/{name}", f"output/coco/{name}"]


def _parse(subset: str, folder: Path, entry: dict[str, Any], number: int) -> QuestionRecord:
    image, question = entry.get("image"), entry.get("text", entry.get("question"))
    if not isinstance(image, str):
        raise ValueError("it has no image")
    if not isinstance(question, str):
        raise ValueError("it has no text")
    if entry.get("label") not in ("yes", "no"):
        raise ValueError("it has no label (yes or no)")
    key = f"{subset} {entry.get('question_id', number)}".strip()  # every subset counts from 1
    return QuestionRecord(path_inside(image, folder), question, (entry["label"],), key, subset)


LAYOUT = Layout(
    "pope",
    "coco_pope_random.json, coco_pope_popular.json and coco_pope_adversarial.json are in output/coco of "
    "https://github.com/AoiDragon/POPE, images (val2014.zip) at https://cocodataset.org/#download; put them into one "
    "folder and give it as --dataset pope:FOLDER, or a file by --questions and the folder of the images by --images.",
    read,
    scoring="yes_no",
    splits={"test": "all"} | {subset: subset for subset in SUBSETS},
    shares_images=True,
)
