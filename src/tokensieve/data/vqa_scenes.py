"""Questions about the embedded scenes and clips, drawn on the fly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tokensieve.data.videos import Video
from tokensieve.data.vqa import EMBEDDED
from tokensieve.data.vqa_items import VqaData, VqaItem
from tokensieve.embedded.clips import FRAMES
from tokensieve.embedded.datasets import EmbeddedClips, EmbeddedQuestions
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
        _check_no_files(name, files)
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


class ClipQuestions(VqaData):
    """The questions about embedded clips. frames: so many of the eight frames of each clip are shown."""

    def __init__(
        self,
        name: str,
        *,
        split: str,
        limit: int | None,
        root: str | os.PathLike[str] | None = None,
        frames: int = FRAMES,
        **files: str | os.PathLike[str] | None,
    ) -> None:
        _check_no_files(name, files)
        self.name, self.split, self.limit, self.frames = name, split, limit, frames
        length: dict[str, Any] = {"length": limit} if split == "train" and limit is not None else {}  # any number to train on
        self.clips = EmbeddedClips(split, **length)
        self.length = min(len(self.clips), len(self.clips) if limit is None else limit)
        self.fingerprint = digest([name, split, self.length, frames])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> VqaItem:
        if not 0 <= index < self.length:
            raise IndexError(index)
        images, question = self.clips[index]
        video = Video(tuple(images), tuple(float(second) for second in range(FRAMES))).evenly(self.frames)
        return VqaItem(images[0], question.text, [question.answer], str(index), question.kind, str(index), video=video)

    def with_frames(self, number: int) -> VqaData:
        if number > FRAMES:
            raise UserError(f"--frames {number}: the clips of {self.name} have {FRAMES} frames.")
        return ClipQuestions(self.name, split=self.split, limit=self.limit, frames=number)


def _check_no_files(name: str, files: Mapping[str, str | os.PathLike[str] | None]) -> None:
    if named := [path for path in files.values() if path is not None]:
        raise UserError(f"{name} is drawn by the program and has no files: leave {named[0]} out, or name another data set.")
