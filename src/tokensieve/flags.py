"""Command-line flags as values, which tasks, commands and plug-ins declare, and the argument types of these flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
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
    help: str  # printed as it is
    default: Any = None
    options: dict[str, Any] = field(default_factory=dict)  # more arguments of argparse's add_argument: type, nargs, action
    aliases: tuple[str, ...] = ()  # other names of the same flag
    group: str = ""  # heading in the help of `eval`; default: that of its task
    separates_results: bool = False  # results with other values are other experiments: the report shows them apart
    repeats: bool = False  # not part of the result's key, but needed to make the result again
    names_result: bool = False  # a switch that is part of the name of the result file
    per_dataset: bool = False  # takes one value for all data sets, or one for each
    excludes: str = ""  # flags with the same word here exclude each other

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments that holds its value."""
        return str(self.options.get("dest", self.name))

    @property
    def switch(self) -> bool | None:
        """What a flag without a value sets; None for a flag with a value."""
        return {"store_true": True, "store_false": False}.get(self.options.get("action", ""))

    def words(self, value: Any) -> list[str]:
        """What to type for a value; nothing for the default."""
        name = f"--{self.name}"
        if self.switch is not None:
            return [name] if value is self.switch else []
        if value is None or value == self.default or [value] == self.default:
            return []
        values = [str(one) for one in value] if isinstance(value, list) else [str(value)]
        if self.options.get("action") == "append":
            return [word for one in values for word in (name, one)]
        return [name, *values]

    def add_to(self, parser: Any) -> None:
        """Add the flag to a parser or to a group of one."""
        names = [f"--{name}" for name in (self.name, *self.aliases)]
        help = self.help.replace("%", "%%")  # argparse expands %(default)s and the like
        parser.add_argument(*names, **{"dest": self.dest, "default": self.default, "help": help, **self.options})


def add_flags(parser: Any, flags: Iterable[Flag]) -> None:
    """Add flags to a parser or to a group of one."""
    exclusive: dict[str, Any] = {}
    for flag in flags:
        if flag.excludes and flag.excludes not in exclusive:
            exclusive[flag.excludes] = parser.add_mutually_exclusive_group()
        flag.add_to(exclusive[flag.excludes] if flag.excludes else parser)


PLUGIN = Flag(
    "plugin",
    "a Python file that adds methods, tasks, data sets or commands; may be given several times",
    options={"action": "append", "metavar": "FILE"},
    repeats=True,
)
DEBUG = Flag("debug", "show tracebacks of errors", argparse.SUPPRESS, {"action": "store_true"})
QUIET = Flag("quiet", "no progress, no tables, no remarks; errors are told", argparse.SUPPRESS, {"action": "store_true"})
JSON = Flag(
    "json",
    "print the result as JSON on standard output, and everything else on standard error",
    argparse.SUPPRESS,
    {"action": "store_true", "dest": "as_json"},
)
COMMON = (QUIET, JSON, DEBUG, PLUGIN)  # the flags of every command
WANDB = Flag(
    "wandb",
    "draw the curves on Weights & Biases too, in this project (WANDB_MODE=offline: only in the folder of the run); those of "
    "TensorBoard are always in DIR/logs/tensorboard",
    options={"metavar": "PROJECT"},
)
COMMAND = "command"  # the attribute of the parsed arguments that holds the name of the command


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


def positive(word: str) -> float:
    """An argument type: a finite number above 0."""
    try:
        number = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number above 0") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is not a finite number above 0")
    return number


def fraction(word: str) -> float:
    """An argument type: a number from 0 to 1."""
    try:
        number = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number from 0 to 1") from None
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{word} is not from 0 to 1")
    return number
