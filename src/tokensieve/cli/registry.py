"""Declarations of commands: each file of this package declares one, and a plug-in may declare more."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokensieve.registry import Registry


@dataclass(frozen=True)
class Result:
    """What a command found out, as --json prints it, and its exit code."""

    value: Any  # what JSON can store
    code: int = 0


@dataclass(frozen=True)
class Command:
    """One command of `tokensieve`. Heavy libraries are imported by `run`, so that `--help` prints at once."""

    name: str
    help: str  # one line in `tokensieve --help`
    description: str  # the beginning of `tokensieve NAME --help`
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Result | int | None]  # an exit code alone is no result; None is 0
    usage: str | None = None  # default: all flags
    order: int = 1000  # place in `tokensieve --help`
    examples: tuple[str, ...] = ()  # command lines at the end of `tokensieve NAME --help`
    # of a command that starts another program: its own words, and those of the program, which `run` finds in args.passed_on
    split: Callable[[Sequence[str]], tuple[list[str], list[str]]] | None = None


COMMANDS: Registry[Command] = Registry("command")


def import_commands() -> None:
    """Import the files of this package, which declare the commands of tokensieve."""
    for module in pkgutil.iter_modules([os.path.dirname(__file__)]):
        if module.name != "__main__":
            importlib.import_module(f"{__package__}.{module.name}")


def all_commands() -> dict[str, Command]:
    """The commands by name, in the order of the help."""
    import_commands()
    return {command.name: command for command in sorted(COMMANDS.values(), key=lambda command: command.order)}
