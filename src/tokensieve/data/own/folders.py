"""Folders of the user's own images: which files are images, which folder is a split. Imports no torch.

PHOTOS/cat/1.jpg, PHOTOS/dog/old/2.png, ...                    all of it is the split "test"
PHOTOS/train/cat/1.jpg, PHOTOS/test/cat/2.jpg, ...             with nothing but folders of splits, each is one
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokensieve.data.images import SUFFIXES
from tokensieve.errors import UserError, short

PREFIXES = ("folder:", "images:")
SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test",)}


@dataclass(frozen=True)
class Listing:
    """The image files of a folder in the order of their paths, and the other files by their endings."""

    images: list[Path]
    others: Counter[str] = field(default_factory=Counter)

    @property
    def note(self) -> str:
        """Which files were left out; nothing if there are none."""
        if not self.others:
            return ""
        kinds = ", ".join(f"{count} {ending or 'without an ending'}" for ending, count in self.others.most_common(4))
        return f"left out, files whose endings are of no image: {short(kinds, 100)}"


def path_of(name: str) -> Path:
    """The folder or file that folder:PATH or images:PATH names."""
    return Path(name.partition(":")[2]).expanduser()


def check(name: str) -> None:
    """A UserError if there is no such folder."""
    prefix, path = name.partition(":")[0], path_of(name)
    if name.endswith(":"):
        raise UserError(f"--dataset {name} names no folder: give one, for example {name}photos/.")
    if path.is_dir() or (path.is_file() and prefix == "images"):
        return
    if path.is_file():
        raise UserError(f"--dataset {short(name, 200)} is a file: folder: takes a folder with a folder for each class.")
    raise UserError(f"--dataset {short(name, 200)}: there is no folder {short(path, 200)}.")


def check_videos(name: str) -> None:
    """A UserError if videos:PATH names no folder."""
    if not path_of(name).is_dir():
        raise UserError(f"--dataset {short(name, 200)} names no folder: give one with videos and questions.csv.")


def list_images(folder: Path) -> Listing:
    """The image files in a folder and the folders inside. Hidden files and folders do not count."""
    found, others = [], Counter[str]()
    for parent, names in _walk(folder):
        for name in names:
            ending = os.path.splitext(name)[1].lower()
            if ending in SUFFIXES:
                found.append(Path(parent, name))
            elif ending not in (".txt", ".csv", ".tsv", ".json", ".md") and name not in ("Thumbs.db", "desktop.ini"):
                others[ending] += 1
    return Listing(sorted(found), others)


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The folders with the names of their files; links to folders are followed, but never in a circle."""
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        yield parent, [name for name in files if not _is_hidden(name)]


def _raise(error: OSError) -> None:
    raise UserError(f"cannot read the folder {short(error.filename, 200)}: {error.strerror}.") from error


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def folders_in(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not _is_hidden(entry.name))
    except OSError as error:
        raise UserError(f"cannot read the folder {short(folder, 200)}: {error.strerror}.") from error


def split_folder(folder: Path, split: str) -> Path:
    """The folder of a split; one without folders of splits is the split "test"."""
    inside = splits_in(folder)
    if inside:
        found = next((name for name in inside if split in (name, split_of(name))), None)
        if found is None:
            raise UserError(f"{short(folder, 200)} has no split {short(split)!r}: there are {', '.join(inside)} (--split).")
        return folder / found
    if split != "test":
        raise UserError(
            f"{short(folder, 200)} has no split {short(split)!r}: sort its images into folders train, val and test, or leave "
            "--split out to use all of them."
        )
    return folder


def splits_in(folder: Path) -> list[str]:
    """The folders of splits; none if there are other folders in it."""
    inside = folders_in(folder)
    return inside if all(map(split_of, inside)) else []


def split_of(name: str) -> str | None:
    """The split that a folder or a row with this name belongs to; None if the name is of no split."""
    return next((split for split, words in SPLITS.items() if name.lower() in words), None)
