"""Questions about images with their answers: VQAv2 and GQA as they are published, a plain JSONL, and the embedded scenes.

    vqav2       v2_OpenEnded_mscoco_val2014_questions.json, v2_mscoco_val2014_annotations.json, val2014/COCO_val2014_%012d.jpg
    gqa         val_balanced_questions.json, images/<imageId>.jpg
    jsonl:FILE  {"image": "a/b.jpg", "question": "...", "answers": ["...", ...]} a line; or "answer"; and "id", "kind" if known
    embedded-questions, embedded-questions-all      scenes drawn on the fly; the latter with the pairs that training never shows

`check()` says before anything starts what of it does not fit together. An image that cannot be read is met while reading.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokensieve.data.vqa_files import FileQuestions, read_gqa, read_jsonl, read_vqav2
from tokensieve.data.vqa_items import VqaData, VqaItem
from tokensieve.errors import UserError, did_you_mean
from tokensieve.provenance import digest

EMBEDDED = {"embedded-questions": "seen", "embedded-questions-all": "all"}  # the pairs of colour and shape that are shown
NAMES = (*EMBEDDED, "vqav2", "gqa")
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
    name = {"embedded": "embedded-questions"}.get(name, name)
    if name.startswith(PREFIX):
        name, questions = "jsonl", questions or name.removeprefix(PREFIX)
    if name in EMBEDDED:
        if given := [flag for flag in (questions, annotations, images) if flag is not None]:
            raise UserError(f"{name} is drawn by the program and has no files: leave {given[0]} out, or name another data set.")
        return SceneQuestions(name, split, limit)
    if name not in ("vqav2", "gqa", "jsonl"):
        known = (*NAMES, "jsonl:FILE")
        raise UserError(f"there are no questions {name!r}: known are {', '.join(known)}.{did_you_mean(name, known)}")
    if name != "vqav2" and annotations is not None:
        raise UserError(f"{name} has its answers beside the questions: leave --annotations {annotations} out.")
    named = {"questions": questions, "annotations": annotations, "images": images}
    paths = {flag: None if path is None else Path(path) for flag, path in named.items()}
    reader = {"vqav2": read_vqav2, "gqa": read_gqa, "jsonl": read_jsonl}[name]
    asked, folder, odd = reader(split, None if root is None else Path(root), **paths)
    if not asked:
        raise UserError(f"{name} ({split}): there is no question in the files.")
    return FileQuestions(name, split, asked, folder, limit, odd)


class SceneQuestions(VqaData):
    """The questions about embedded scenes."""

    def __init__(self, name: str, split: str, limit: int | None) -> None:
        from tokensieve.embedded.datasets import EmbeddedQuestions

        self.name, self.split = name, split
        drawn: dict[str, Any] = (
            {"length": limit} if split == "train" and limit is not None else {}
        )  # for training as many as one likes
        self.scenes = EmbeddedQuestions(split, pairs=EMBEDDED[name], **drawn)
        self.length = min(len(self.scenes), len(self.scenes) if limit is None else limit)
        self.fingerprint = digest([name, split, self.length])  # drawn by code, which is in the key of every result already

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> VqaItem:
        if not 0 <= index < self.length:
            raise IndexError(index)
        image, asked = self.scenes[index]
        return VqaItem(image, asked.text, [asked.answer], str(index), asked.kind, str(index))
