"""The images that a search uses: files of the user, of which some may be damaged, in a fixed random order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from tokensieve.data.images import BrokenImage, open_photo
from tokensieve.data.own.files import list_files_of_choice
from tokensieve.errors import UserError, short
from tokensieve.files import read_lines
from tokensieve.provenance import digest, file_stat

T = TypeVar("T")
LEAST = 8  # readable images; fewer say nothing about others
SHOWN = 5  # names in a message


@dataclass(frozen=True)
class Request:
    """What a user asks to be compared: the model's name, the images and, of models that read text, the questions."""

    model: str
    images: Sequence[str] | None = None  # files, folders, folder: and csv: names; None: those that ship with the model
    questions: str | None = None  # a text file
    limit: int = 256  # images at most
    seed: int = 0


@dataclass(frozen=True)
class ImageSet:
    """Images in the order in which they are used, so that the first few are a random sample of all."""

    source: str  # where they are from, in words
    fingerprint: str  # of names, sizes and times of the files
    items: Sequence[Any]  # what a Subject reads: files, or indices of drawn samples
    available: int  # how many there were to choose from
    unreadable: dict[str, str] = field(default_factory=dict)  # file: reason
    remark: str = ""  # which splits were read, of data that have some

    def __len__(self) -> int:
        return len(self.items)


def find_images(request: Request) -> ImageSet:
    """The readable images among the files, folders and data sets of a request; a UserError if they are too few."""
    assert request.images is not None
    return select_from(request.images, request, open_photo)


def select_from(names: Sequence[str], request: Request, read: Callable[[str], Any]) -> ImageSet:
    """`select_readable` for the files that these names mean; of data with splits those of one split."""
    named = list_files_of_choice(names)
    files = dict.fromkeys(str(file) for one in named for file in one.files)
    splits = [f"{short(one.text, 200)}: the split {short(one.split)}" for one in named if one.split is not None]
    remark = f"the plan was chosen on {'; '.join(splits)}" if splits else ""
    return replace(select_readable(list(files), request, read), remark=remark)


def select_readable(files: Sequence[str], request: Request, read: Callable[[str], Any]) -> ImageSet:
    """Up to `limit` files that `read` can decode, in an order that depends on the seed alone."""
    source = ", ".join(request.images or ())
    kept: list[str] = []
    unreadable: dict[str, str] = {}
    for number in np.random.default_rng(request.seed).permutation(len(files)):
        if len(kept) == request.limit:
            break
        try:
            read(files[number])
            kept.append(files[number])
        except BrokenImage as error:
            unreadable[files[number]] = str(error)
    check_count(len(kept), source, unreadable)
    return ImageSet(source, digest([(file, *file_stat(file)) for file in kept]), kept, len(files), unreadable)


def read_again(file: str, read: Callable[[str], T]) -> T:
    """A file that could be read when the search began; a UserError if it cannot any more."""
    try:
        return read(file)
    except BrokenImage as error:
        raise UserError(
            f"{short(file, 200)} could be read before and cannot any more ({error}); run the search again"
        ) from None


def draw_numbers(name: str, length: int, request: Request) -> ImageSet:
    """Indices of drawn samples, in a random order."""
    order = np.random.default_rng(request.seed).permutation(length)[: request.limit]
    check_count(len(order), name, {})
    return ImageSet(name, digest([name, length]), [int(index) for index in order], length)


def check_count(readable: int, source: str, unreadable: dict[str, str]) -> None:
    """A UserError if there are too few images."""
    if readable < LEAST:
        damaged = f" ({describe_unreadable(unreadable)})" if unreadable else ""
        raise UserError(f"--images {source}: {readable} readable images, but at least {LEAST} are needed{damaged}")


def describe_unreadable(unreadable: dict[str, str]) -> str:
    """How many files cannot be read, with the names and reasons of some."""
    shown = [f"{short(file, 200)}: {short(reason, 80)}" for file, reason in list(unreadable.items())[:SHOWN]]
    more = f"; and {len(unreadable) - SHOWN} more" if len(unreadable) > SHOWN else ""
    return f"{len(unreadable)} cannot be read: {'; '.join(shown)}{more}"


def read_questions(path: str) -> list[str]:
    """The questions of a text file, one a line."""
    questions = [line.strip() for line in read_lines(path, "--questions", "question") if line.strip()]
    if not questions:
        raise UserError(f"--questions {path} holds no question; write one a line")
    return questions
