"""Questions about images or videos with their answers: in files of published data sets, in a JSONL, about embedded scenes.

    vqav2, gqa, textvqa, pope, scienceqa, mmbench   as published, under --dataset_root or by their files
    gqa:PATH and so on                              the same, in a folder or from the file of the questions
    csv:FILE    a table of the user's own with the columns image, question and answer, declared in own/__init__.py
    jsonl:FILE  {"image": "a/b.jpg", "question": "...", "answers": ["...", ...]} a line; or "answer"; "id" and "kind" if known
    embedded-questions, embedded-questions-all      scenes drawn on the fly; the latter with the pairs that training never shows
    embedded-clips                                  clips drawn on the fly

This module declares them and imports no torch; `vqa_layouts` has the layouts of the files. `VqaData.check()` lists what does
not fit together before anything starts; an image that cannot be read is found while reading.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tokensieve import embedded
from tokensieve.data.registry import DATASETS, DatasetSpec, find_dataset
from tokensieve.errors import UserError, did_you_mean
from tokensieve.registry import resolve

if TYPE_CHECKING:
    from tokensieve.data.vqa_items import VqaData

EMBEDDED = {"embedded-questions": "seen", "embedded-questions-all": "all"}  # the pairs of colour and shape that are shown
CLIPS = "embedded-clips"
PREFIX = "jsonl:"


def load(
    name: str = "embedded-questions",
    *,
    questions: str | os.PathLike[str] | None = None,
    annotations: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | None = None,
    split: str = "test",
    limit: int | None = None,
    root: str | os.PathLike[str] | None = None,
) -> VqaData:
    """The questions of that name; only the first `limit` of them.

    Files that are not named are looked for under `root`, where the published archives put them.
    """
    name = {"embedded": "embedded-questions", "jsonl": PREFIX, "csv": "csv:"}.get(name, name)
    spec = find_dataset(name, "questions")
    if spec is None or spec.contents != "questions":
        known = [spec.usage for spec in DATASETS.values() if spec.contents == "questions"]
        raise UserError(f"there are no questions {name!r}: known are {', '.join(known)}.{did_you_mean(name, known)}")
    files = {"questions": questions, "annotations": annotations, "images": images}
    data: VqaData = resolve(spec.build)(name, split=split, limit=limit, root=root, **files)
    return data


def _declare(name: str, summary: str, build: str, argument: str = "", model: str = "") -> None:
    DATASETS.add(DatasetSpec(name, summary, build, "questions", "vqa", "questions", argument, model=model), origin=__name__)


_FILES, _SCENES = "tokensieve.data.vqa_files:build", "tokensieve.data.vqa_scenes:SceneQuestions"
_declare("embedded-questions", "questions about drawn scenes of several objects", _SCENES)
_declare("embedded-questions-all", "the same, with the pairs of colour and shape that no training image shows", _SCENES)
_declare(
    CLIPS,
    "questions about drawn clips of eight frames",
    "tokensieve.data.vqa_scenes:ClipQuestions",
    model=embedded.LLAVA_VIDEO,
)
for _name, _summary in (
    ("vqav2", "VQAv2: ten answers to every question"),
    ("gqa", "GQA: one answer to every question"),
    ("textvqa", "TextVQA: questions about text in images"),
    ("pope", "POPE: is an object in the image, yes or no"),
    ("scienceqa", "ScienceQA, its questions with an image: multiple choice"),
    ("mmbench", "MMBench: multiple choice, images inside the file"),
):
    _declare(_name, f"{_summary}; as published", _FILES)
    _declare(f"{_name}:", f"{_name} in a folder, or from the file of its questions", _FILES, argument="PATH")
_declare(PREFIX, "questions of the user's own, one JSON object a line", _FILES, argument="FILE")
