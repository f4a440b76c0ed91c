"""Where the images or videos of questions are: in a folder, or inside the file of the questions."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from tokensieve.data import videos
from tokensieve.data.images import SUFFIXES, BrokenImage, open_image
from tokensieve.data.videos import Header, Video
from tokensieve.provenance import file_stat


class Images(Protocol):
    """Images by name, or videos."""

    kind: str  # "image" or "video", for messages

    def open(self, name: str) -> Image.Image | Video:
        """The image in RGB, or the video; BrokenImage if it is missing or damaged."""

    def list_names(self, wanted: Iterable[str]) -> set[str]:
        """All images where the wanted ones should be."""

    def stamp(self, name: str) -> Any:
        """What changes if the image changes."""


class ImageFolder:
    """Images in files of one folder; a name is a path inside it."""

    kind, suffixes = "image", SUFFIXES

    def __init__(self, folder: Path, read: Callable[[Path], Image.Image] = open_image) -> None:
        self.folder, self.read = folder, read

    def __str__(self) -> str:
        return str(self.folder)

    def open(self, name: str) -> Image.Image | Video:
        return self.read(self.folder / name)

    def list_names(self, wanted: Iterable[str]) -> set[str]:
        names: set[str] = set()
        for inside in dict.fromkeys(os.path.dirname(name) for name in wanted):
            try:
                with os.scandir(self.folder / inside) as listing:
                    pictures = [entry.name for entry in listing if entry.name.lower().endswith(self.suffixes)]
            except OSError:
                pictures = []
            names.update(os.path.join(inside, name) for name in pictures)
        return names

    def stamp(self, name: str) -> Any:
        return file_stat(self.folder / name)


class VideoFolder(ImageFolder):
    """Videos in files of one folder, of each of which a number of frames is read."""

    kind, suffixes = "video", videos.SUFFIXES

    def __init__(self, folder: Path, frames: int = videos.FRAMES) -> None:
        super().__init__(folder)
        self.frames = frames

    def open(self, name: str) -> Video:
        return videos.open_video(self.folder / name, self.frames)

    def header(self, name: str) -> Header | None:
        """What is known of a video before its frames are read; None if it cannot be read, which is told when it is opened."""
        try:
            return videos.read_header(self.folder / name)
        except BrokenImage:
            return None


class EncodedImages:
    """Images in base64 inside one file."""

    kind = "image"

    def __init__(self, file: Path, encoded: dict[str, str]) -> None:
        self.file, self.encoded = file, encoded

    def __str__(self) -> str:
        return str(self.file)

    def open(self, name: str) -> Image.Image:
        try:
            content = base64.b64decode(self.encoded[name])
        except KeyError as error:
            raise BrokenImage("there is no such image") from error
        except ValueError as error:
            raise BrokenImage(f"it is not base64 ({error})") from error
        return open_image(io.BytesIO(content))

    def list_names(self, wanted: Iterable[str]) -> set[str]:
        return set(self.encoded)

    def stamp(self, name: str) -> Any:
        return file_stat(self.file)


def path_inside(name: str, folder: Path) -> str:
    """The path of an image inside the folder; a ValueError if it points outside."""
    inside = os.path.normpath(name)
    if os.path.isabs(inside) or inside.split(os.sep)[0] == os.pardir:
        raise ValueError(f"the image {name!r} is outside {folder}")
    return inside
