"""Writes the pages of docs/ that are generated: the command line from its parsers, the methods from their registry.

python docs/tooling/generate.py [FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from tokensieve.cli import methods
from tokensieve.cli.parser import build_parser
from tokensieve.cli.registry import COMMANDS, all_commands
from tokensieve.plugins import is_built_in

DOCS = Path(__file__).parents[1]
INTRODUCTION = """# Command line

Every command with its flags, written from the parsers by `make docs`. `tokensieve COMMAND --help` prints the same.
Every command takes `--plugin FILE`, which loads [plug-ins](plugins.md), `--json`, which prints the result as JSON on
standard output and all else on standard error, `--quiet`, which leaves out progress, tables and remarks, and `--debug`, which
shows tracebacks of errors."""


def command_line() -> str:
    """All commands of tokensieve itself, as a Markdown page."""
    names = [name for name in all_commands() if is_built_in(COMMANDS.origin(name))]
    lines = [INTRODUCTION, "", "| command | |", "|---|---|"]
    lines += [f"| [`{name}`](#tokensieve-{name}) | {_cell(all_commands()[name].help)} |" for name in names]
    for name in names:
        _, by_name = build_parser(name)
        lines += ["", f"## tokensieve {name}", "", by_name[name].description or "", *_tables(by_name[name])]
    return "\n".join(lines) + "\n"


def _tables(parser: argparse.ArgumentParser) -> Iterator[str]:
    """One table a group of flags."""
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS and a.dest not in ("help", "plugin", "debug")]
        if not actions:
            continue
        title = {"options": "flags", "positional arguments": "arguments"}.get(group.title or "", group.title)
        yield from ("", f"*{title}*", "")
        yield from ("| | |", "|---|---|")
        for action in actions:
            yield f"| {_names(action)} | {_words(action)}{_cell(action.help or '').replace('%%', '%')}{_default(action)} |"


def _names(action: argparse.Action) -> str:
    """The names of a flag with the value it takes."""
    value = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar or action.dest.upper()
    value = action.dest.upper() if value.startswith("{") else value
    if action.nargs is not None:
        value = {0: "", "*": f"[{value} ...]", "+": f"{value} ...", "?": f"[{value}]"}.get(action.nargs, value)
    first, *others = action.option_strings or [""]
    return _cell(", ".join([f"`{first} {value}".replace("` ", "`").rstrip() + "`", *(f"`{name}`" for name in others)]))


def _words(action: argparse.Action) -> str:
    """The words that a flag takes, if they are few."""
    if isinstance(action.metavar, str) and action.metavar.startswith("{"):
        words = action.metavar.strip("{}").split(",")
    else:
        words = [str(word) for word in action.choices or ()]
    return ", ".join(f"`{word}`" for word in words) + ": " if words else ""


def _default(action: argparse.Action) -> str:
    value = action.default
    if action.nargs == 0 or value in (None, False, argparse.SUPPRESS, "", [], ()) or "default" in (action.help or ""):
        return ""
    shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return f" (default: `{_cell(shown)}`)"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


PAGES = {"command-line.md": command_line, "methods.md": lambda: methods.markdown() + "\n"}


def main(folder: Path) -> None:
    for name, write in PAGES.items():
        (folder / name).write_text(write(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
