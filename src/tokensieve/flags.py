"""Command-line flags as values: what a task, a command or a plug-in declares, and the types their words are read with."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokensieve.errors import did_you_mean


@dataclass(frozen=True)
class Flag:
    """One flag of a command.

    A task declares its flags with it. The parser, the help, the result's key, the report and the command that repeats a
    result read this declaration.
    """

    name: str  # without dashes: "recall_k"
    help: str
    default: Any = None
    options: dict[str, Any] = field(default_factory=dict)  # more arguments of argparse's add_argument: type, nargs, metavar
    separates_results: bool = False  # results with other values are other experiments: the report shows them apart
    repeats: bool = False  # not part of the result's key, but needed to make the result again
    excludes: str = ""  # flags with the same word here exclude each other

    def add_to(self, parser: Any) -> None:
        """Adds the flag to a parser or to a group of one."""
        parser.add_argument(f"--{self.name}", default=self.default, help=self.help, **self.options)


def add_flags(parser: Any, flags: tuple[Flag, ...]) -> None:
    """Adds flags to a parser or to a group of one."""
    exclusive: dict[str, Any] = {}
    for flag in flags:
        if flag.excludes and flag.excludes not in exclusive:
            exclusive[flag.excludes] = parser.add_mutually_exclusive_group()
        flag.add_to(exclusive[flag.excludes] if flag.excludes else parser)


def one_of(*options: str) -> Callable[[str], str]:
    """An argument type: one of these words. An error names the nearest one."""

    def check(word: str) -> str:
        if word not in options:
            hint = did_you_mean(word, options)
            raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(options)}.{hint}")
        return word

    return check


def boolean(word: str) -> bool:
    """An argument type: true or false as it is written (`--normalize False` means False)."""
    if word.lower() in ("true", "yes", "on", "1"):
        return True
    if word.lower() in ("false", "no", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{word!r} is neither True nor False")


def integer_in(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argument type: a whole number that is not below `least`, nor above `most` if there is one."""

    def check(word: str) -> int:
        try:
            number = int(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word!r} is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{word} is too small: at least {least}")
        if most is not None and number > most:
            raise argparse.ArgumentTypeError(f"{word} is too large: at most {most}")
        return number

    return check


def fraction(word: str) -> float:
    """An argument type: a number from 0 to 1."""
    try:
        number = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number from 0 to 1") from None
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{word} is not from 0 to 1")
    return number
