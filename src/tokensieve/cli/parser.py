"""The parser of the command line. Errors are UserErrors of one line that name the nearest command or flag."""

from __future__ import annotations

import argparse
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from tokensieve import plugins
from tokensieve.cli.registry import COMMANDS, all_commands, import_commands
from tokensieve.errors import UserError, did_you_mean, one_line, short
from tokensieve.flags import COMMAND, COMMON, PLUGIN, add_flags


class Help(argparse.HelpFormatter):
    """Wraps paragraphs, but not texts that have lines of their own, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and textwrap.fill(heading, self._width - 1))


class Parser(argparse.ArgumentParser):
    """argparse with whole flag names only, which raises a UserError of one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": Help, **options})

    def has_flag(self, name: str) -> bool:
        return f"--{name}" in self._option_string_actions

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


class Version(argparse.Action):
    """Prints versions and ends. No library is imported for it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "nargs": 0, "default": argparse.SUPPRESS})

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from tokensieve.installation import packages

        for name, version in packages.main_versions().items():
            print(f"{name} {version}")
        parser.exit()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, after the plug-ins that they name are loaded. Prints the help if there is no command."""
    import_commands()  # before plug-ins, so that these cannot take their names
    files, words = split_plugins(argv)
    load_plugins(files)
    first = next((word for word in words if not word.startswith("-")), None)
    with warnings_on_stderr():
        parser, by_name = build_parser(first)
    if first is not None and first not in by_name:
        raise UserError(f"{first!r} is not a command: use {', '.join(by_name)}.{_command_meant(first, by_name)}")
    passed_on: list[str] = []
    if first is not None and (split := COMMANDS[first].split) is not None:
        at = words.index(first) + 1
        own, passed_on = split(words[at:])
        words = [*words[:at], *own]
    args, unknown = parser.parse_known_args(words)
    current = by_name.get(args.command, parser)
    many = next((action.dest for action in current._actions if not action.option_strings and action.nargs in ("*", "+")), None)
    if many is not None and not any(word.startswith("-") for word in unknown):  # argparse takes no words after flags
        vars(args)[many] = [*getattr(args, many), *unknown]
    elif unknown:
        word = next((u for u in unknown if u.startswith("-")), unknown[0])
        known = [flag for action in current._actions for flag in action.option_strings]
        flag = word.split("=", 1)[0]
        is_plan = "--plan" in known and not flag.startswith("-") and (":" in flag or "@" in flag)
        hint = f" Did you mean --plan {short(flag)!r}?" if is_plan else did_you_mean(flag, known)
        raise UserError(f"{current.prog} has no argument {short(flag)!r}.{hint} (see {current.prog} --help)")
    if args.command is None:
        parser.print_help()
    args.plugin, args.passed_on, args.typed = files or None, passed_on, list(argv)
    for common in COMMON:
        if common.switch:
            vars(args).setdefault(common.dest, False)
    return args


def _command_meant(word: str, names: Iterable[str]) -> str:
    """A hint to the command, or to the flag, that a word in the place of a command means."""
    known = [*names, "--help", "--version"]
    longer = [name for name in known if len(name) >= 4 and word.startswith(name)]  # evaluate, training, benchmark
    return f" Did you mean {longer[0]!r}?" if longer else did_you_mean(word, known)


def build_parser(chosen: str | None) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and the parser of each command by its name.

    Only the chosen command gets its flags, so that a command of a plug-in whose flags are wrong does not stop the others.
    """
    parser = Parser(
        prog="tokensieve",
        description="Keep the vision tokens that matter: select, prune, merge and measure in CLIP models.",
        epilog="tokensieve COMMAND --help explains a command, with examples.",
    )
    parser.add_argument("--version", action=Version, help="print the versions of tokensieve and its libraries")
    commands = parser.add_subparsers(dest=COMMAND, metavar="COMMAND", parser_class=Parser)
    by_name: dict[str, Parser] = {}
    for name, command in all_commands().items():
        by_name[name] = commands.add_parser(
            name,
            help=command.help.replace("%", "%%"),
            description=command.description,
            usage=command.usage,
            epilog="\n".join(["examples:", *(f"  {line}" for line in command.examples)]) if command.examples else None,
        )
    if chosen in by_name:
        add_command_flags(chosen, by_name[chosen])
    for each in (parser, *by_name.values()):
        add_common_flags(each)
    return parser, by_name


def add_common_flags(parser: Parser) -> None:
    """Add the flags of every command, except for those that the command has declared itself."""
    add_flags(parser.add_argument_group("on every command"), (flag for flag in COMMON if not parser.has_flag(flag.name)))


def add_command_flags(name: str, parser: Parser) -> None:
    """Add the flags of a command to its parser. An error of a plug-in's command is a UserError that names the plug-in."""
    origin = COMMANDS.origin(name)
    try:
        COMMANDS[name].add_flags(parser)
    except Exception as error:
        if isinstance(error, UserError) or plugins.is_built_in(origin):
            raise
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        raise UserError(f"the flags of the command {name} of {plugins.describe_origin(origin)} are wrong: {reason}") from error


def split_plugins(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files that --plugin names, and the other words: plug-ins add flags and commands, so they are loaded first."""
    files: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words:
        if word == f"--{PLUGIN.name}":
            file = next(words, None)
            if file is None or file.startswith("-"):
                raise UserError("--plugin needs the path of a Python file, such as --plugin my_methods.py")
            files.append(file)
        elif word.startswith(f"--{PLUGIN.name}="):
            files.append(word.partition("=")[2])
        else:
            others.append(word)
    return list(dict.fromkeys(files)), others


def load_plugins(files: Sequence[str]) -> None:
    """Load the plug-ins of installed packages, and these files. A broken package is left out with one line on stderr."""
    with warnings_on_stderr():
        plugins.load_plugins()
    for file in files:
        plugins.load_plugin(file)


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Print warnings about plug-ins as one line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        if warning.category is UserWarning:
            print(f"tokensieve: {warning.message}", file=sys.stderr)
