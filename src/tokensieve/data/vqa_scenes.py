"""Questions about the embedded scenes, drawn on the fly."""

from __future__ import annotations

import os
from typing import Any

from tokensieve.data.vqa import EMBEDDED
from tokensieve.data.vqa_items import VqaData, VqaItem
from tokensieve.embedded.datasets import EmbeddedQuestions
from tokensieve.errors import UserError
from tokensieve.provenance import digest


class SceneQuestions(VqaData):
    """The questions about embedded scenes; there are no files of them, so `root` is not used."""

    def __init__(
        self,
        name: str,
        *,
        split: str,
        limit: int | None,
        root: str | os.PathLike[str] | None = None,
        **files: str | os.PathLike[str] | None,
    ) -> None:
        if named := [path for path in files.values() if path is not None]:
            raise UserError(f"{name} is drawn by the program and has no files: leave {named[0]} out, or name another data set.")
        self.name, self.split = name, split
        length: dict[str, Any] = {"length": limit} if split == "train" and limit is not None else {}  # any number to train on
        self.scenes = EmbeddedQuestions(split, pairs=EMBEDDED[name], **length)
        self.length = min(len(self.scenes), len(self.scenes) if limit is None else limit)
        self.fingerprint = digest([name, split, self.length])  # drawn by code, which is part of the key of every result

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> VqaItem:
        if not 0 <= index < self.length:
            raise IndexError(index)
        image, question = self.scenes[index]
        return VqaItem(image, question.text, [question.answer], str(index), question.kind, str(index))
