"""A YAML file with the line of every key, and errors that carry those lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokensieve import files
from tokensieve.config import yaml_tree
from tokensieve.config.yaml_tree import KeyPath
from tokensieve.errors import UserError, short

MAX_ERRORS = 50  # errors of a file that are listed
MAX_ERROR = 800  # letters of an error
COMMAND_LINE = " (command line)"  # behind the key of a value that is not in the file
MAX_MESSAGE = 1000  # letters of the errors in a message of one line


@dataclass(frozen=True, order=True)
class ConfigError:
    """One error in a file."""

    line: int
    path: str
    message: str

    @property
    def is_override(self) -> bool:
        """Whether it is in a value of the command line."""
        return self.path.endswith(COMMAND_LINE)

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigErrors(UserError):
    """All errors of a file. The message is one line with the first ones; `lines` has one line for each error.

    block: lines to paste into the file, if a section is missing; they end the message.
    more: how many errors there are besides.
    """

    def __init__(self, file: Path, errors: Iterable[ConfigError], block: str = "", more: int = 0) -> None:
        self.file, self.errors, self.block = file, sorted(set(errors)), block
        self.more = more + len(self.errors[MAX_ERRORS:])
        shown = [str(error) if error.is_override else f"line {error.line}: {error}" for error in self.errors[:MAX_ERRORS]]
        fitting = max(1, sum(length <= MAX_MESSAGE for length in accumulate(map(len, shown))))
        rest = len(shown) - fitting + self.more
        message = f"{short(file, 300)}: {'; '.join(shown[:fitting])}"
        message += f"; and {rest} more, which tokensieve validate lists" if rest > 0 else ""
        super().__init__(f"{message}\n\n{block}" if block else message)

    @property
    def lines(self) -> list[str]:
        name = short(self.file, 300)
        lines = [f"{name}:{error.line}: {error}" for error in self.errors[:MAX_ERRORS]]
        if self.more:
            lines.append(f"{name}: and {self.more:,} more errors")
        return [*lines, "", self.block] if self.block else lines


class Document:
    """A YAML file: its values, and the line of every key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = files.read_text(path, yaml_tree.MAX_BYTES)
        try:
            tree = yaml_tree.read(text)
        except yaml_tree.TextError as error:
            raise ConfigErrors(path, [ConfigError(error.line, "", str(error))]) from None
        if not isinstance(tree.value, dict):
            found = "nothing" if tree.value is None else type(tree.value).__name__
            raise ConfigErrors(path, [ConfigError(1, "", f"expected keys and values, such as 'task: clip', but found {found}")])
        self.data: dict[str, Any] = tree.value
        self.lines = tree.lines
        self.overridden: set[KeyPath] = set()
        self.unread = tree.unread
        self.problems = tree.problems

    def override(self, path: KeyPath, text: str) -> None:
        """Sets a key to a value of the command line; sections that the file does not have are made."""
        try:
            tree = yaml_tree.read_value(text)
        except yaml_tree.TextError as error:
            raise UserError(f"{_dotted(path)}{COMMAND_LINE}: {error}") from None
        section: Any = self.data
        for step in path[:-1]:
            if isinstance(section, dict) and section.get(str(step)) is None:
                section[str(step)] = {}
            section = child(section, step)
        last = path[-1]
        if isinstance(section, dict):
            section[str(last)] = tree.value
        elif isinstance(section, list) and isinstance(last, int) and last < len(section):
            section[last] = tree.value
        else:
            raise UserError(f"{_dotted(path)}: {short(self.path, 300)} has no such key")
        self.overridden.add(path)
        self.problems = [problem for problem in self.problems if not is_below(problem[0], path)]
        self.problems += [((*path, *below), self.line(path), message) for below, _, message in tree.problems]
        self.unread = {one for one in self.unread if not is_below(one, path)} | {(*path, *below) for below in tree.unread}

    def has(self, path: KeyPath) -> bool:
        """Whether a key is in the file or on the command line."""
        section: Any = self.data
        for step in path:
            section = child(section, step, MISSING)
        return section is not MISSING

    def line(self, path: Sequence[int | str]) -> int:
        """The line of a key, or of the nearest one above it that the file has."""
        known = (self.lines.get(tuple(path[:length])) for length in range(len(path), 0, -1))
        return next((line for line in known if line is not None), 1)

    def errors(self) -> list[ConfigError]:
        """What is wrong in the file whatever its keys mean."""
        return [ConfigError(line, self._name(path), short(message, MAX_ERROR)) for path, line, message in self.problems]

    def error(self, path: KeyPath, message: str) -> ConfigError:
        """An error in the value of a key."""
        default = "" if self.has(path) else " (this is the default: the file has no such key)"
        return ConfigError(self.line(path), self._name(path), short(message, MAX_ERROR) + default)

    def missing(self, path: KeyPath, message: str) -> ConfigError:
        """An error for a key that has to be in the file."""
        return ConfigError(self.line(path), self._name(path), short(message, MAX_ERROR))

    def _name(self, path: KeyPath) -> str:
        given = any(is_below(path, one) or (path and path not in self.lines and is_below(one, path)) for one in self.overridden)
        return _dotted(path) + (COMMAND_LINE if given else "")


MISSING = object()


def key_path(key: str) -> KeyPath:
    """The keys of a dotted path: "phases.0.steps" is ("phases", 0, "steps")."""
    return tuple(int(part) if re.fullmatch("[0-9]{1,6}", part) else part for part in key.split("."))


def child(section: Any, step: int | str, default: Any = None) -> Any:
    """A value of a section or a list; the default where there is none."""
    if isinstance(section, dict):
        return section.get(str(step), default)
    if isinstance(section, list) and isinstance(step, int) and 0 <= step < len(section):
        return section[step]
    return default


def is_below(path: KeyPath, above: KeyPath) -> bool:
    """Whether a path is the other one, or below it."""
    return path[: len(above)] == above


def _dotted(path: Sequence[int | str]) -> str:
    return short(".".join(map(str, path)), 200)
