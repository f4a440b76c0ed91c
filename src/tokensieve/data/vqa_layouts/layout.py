"""The interface of a layout: what it declares, where its files are, and what it reads from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tokensieve import files
from tokensieve.data.vqa_items import QuestionRecord
from tokensieve.data.vqa_layouts.images import Images
from tokensieve.errors import UserError, did_you_mean

MAX_BYTES = 4 << 30  # of an annotation file
EXAMPLES = 3  # of every kind of problem are named
T = TypeVar("T")


@dataclass(frozen=True)
class Contents:
    """What the files of a data set hold."""

    records: list[QuestionRecord]
    images: Images
    remarks: list[str] = field(default_factory=list)  # what is odd in the files


@dataclass(frozen=True)
class Layout:
    """How a data set is published."""

    name: str
    advice: str  # one line: where the files come from and how to name them
    read: Callable[[Files], Contents]
    scoring: str = "open"  # as in VqaData
    splits: Mapping[str, str] = field(default_factory=dict)  # by name: the word for it in file names; empty: no splits
    unanswered: tuple[str, ...] = ()  # splits whose answers are not published
    has_annotations: bool = False  # its answers are in a second file
    shares_images: bool = False  # its folder of images serves other splits or data sets too


@dataclass(frozen=True)
class Files:
    """Where the files of a data set are: those that the user named, and the folder with the others."""

    layout: Layout
    split: str
    root: Path | None
    questions: Path | None = None
    annotations: Path | None = None
    images: Path | None = None

    def error(self, problem: str) -> UserError:
        """The error for a problem with the files, with the advice of the layout."""
        return UserError(f"{self.layout.name}: {problem} {self.layout.advice}")

    def word(self) -> str:
        """The word for the split in file names; a UserError if there is no such split, or if its answers are not published."""
        name, splits = self.layout.name, self.layout.splits
        if self.split not in splits:
            raise UserError(
                f"{name} has no split {self.split!r}: there are {', '.join(splits)}.{did_you_mean(self.split, splits)}"
            )
        if self.split in self.layout.unanswered:
            raise self.no_answers(f"split {self.split!r}")
        return splits[self.split]

    def no_answers(self, what: str) -> UserError:
        """The error for a split, or a file of one, without answers."""
        scored = [split for split in self.layout.splits if split not in self.layout.unanswered]
        return UserError(
            f"the answers of {self.layout.name}'s {what} are not published, so nothing can be scored: "
            f"give --split {' or '.join(reversed(scored))}."
        )

    def find(self, what: str, usual: Sequence[str], beside: Path | None = None) -> Path:
        """The file or folder that the user named, or the first of the usual ones.

        They are looked for under the root, in the folder of the file `beside`, and in the folder above it.
        """
        path: Path | None = getattr(self, what)
        if path is not None:
            if path.exists():
                return path
            raise self.error(f"there is no {path} (--{what}).")
        folders = [self.root, *(beside.parents[:2] if beside is not None else ())]
        found = [folder / inside for inside in usual for folder in folders if folder is not None and (folder / inside).exists()]
        if found:
            return found[0]
        if self.root is None:
            raise UserError(
                f"{self.layout.name} needs --{what}, or --dataset_root with the folder that holds {usual[0]}. "
                f"{self.layout.advice}"
            )
        raise self.error(f"there is no {usual[0]} in {self.root}.")


def read_json(path: Path) -> Any:
    """The content of an annotation file."""
    return files.read_json(path, MAX_BYTES)


def read_entries(content: Any, key: str, path: Path, needed: Sequence[str]) -> list[dict[str, Any]]:
    """The list under a key of a file, every entry with what it needs."""
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise UserError(f'{path} is not as published: it has no list "{key}".{_swapped(content, key)}')
    for number, entry in enumerate(entries):
        check_keys(entry, needed, f'{path}: entry {number} of "{key}"')
    return entries


def check_keys(entry: Any, needed: Sequence[str], where: str, hint: str = "") -> None:
    """A UserError if an entry is not a table of values by name, or lacks one of these."""
    missing = [name for name in needed if name not in entry] if isinstance(entry, dict) else list(needed)
    if missing:
        raise UserError(f"{where} has no {', '.join(missing)}.{hint}")


def _swapped(content: Any, key: str) -> str:
    other = {"questions": "annotations", "annotations": "questions"}.get(key, "")
    return f" It has {other}: is it the file for --{other}?" if other and isinstance(content, dict) and other in content else ""


def read_lines(path: Path, parse: Callable[[dict[str, Any], int], T], advice: str) -> list[T]:
    """What `parse` makes of every line of a JSONL and its number, from 1 on; a UserError with the lines that are wrong.

    parse: raises a ValueError with the problem of a line.
    """
    parsed, problems = [], []
    for number, line in _text_lines(path):
        try:
            entry = json.loads(line)
        except ValueError as error:
            problems.append(f"line {number}: it is not JSON ({error})")
            continue
        try:
            if not isinstance(entry, dict):
                raise ValueError("it is not a table of values by name")
            parsed.append(parse(entry, number))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise UserError(f"{path}: {len(problems)} lines are wrong; {few(problems)}. {advice}")
    return parsed


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    lines = files.read_text(path, MAX_BYTES).splitlines()
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def few(examples: Sequence[str]) -> str:
    return ", ".join(examples[:EXAMPLES]) + (f" and {len(examples) - EXAMPLES} more" if len(examples) > EXAMPLES else "")
