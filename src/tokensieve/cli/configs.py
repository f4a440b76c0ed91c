"""`tokensieve configs`: the training files that ship with the package."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command, Result
from tokensieve.errors import UserError

ACTIONS = ("list", "show", "copy")


def add_configs_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="list", help="default: list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="of show and copy: a name that list prints")
    parser.add_argument(
        "dest", nargs="?", metavar="DEST", help="of copy: a folder or a file name (default: the current folder)"
    )


def run_configs(args: argparse.Namespace) -> Result:
    from tokensieve.config import shipped

    if args.action == "list":
        if args.name is not None:
            raise UserError(f"configs list takes no name; tokensieve configs show {args.name} prints that file")
        return _list(args)
    if args.name is None:
        raise UserError(f"configs {args.action}: which file? There are {', '.join(shipped.shipped())}")
    if args.action == "show":
        if args.dest is not None:
            raise UserError(f"configs show prints one file; to copy it, use tokensieve configs copy {args.name} {args.dest}")
        text = shipped.get(args.name).read_text(encoding="utf-8")
        if not args.as_json:
            print(text, end="")
        return Result({"name": args.name, "text": text})
    path = shipped.copy(args.name, args.dest)
    if not args.quiet:
        print(path)
    return Result({"file": str(path)})


def _list(args: argparse.Namespace) -> Result:
    import textwrap

    from tokensieve.config import shipped

    found = {name: shipped.summary(path) for name, path in shipped.shipped().items()}
    for name, summary in found.items() if not args.as_json else ():
        print(name)
        print(textwrap.fill(summary, 79, initial_indent="    ", subsequent_indent="    "))
    return Result([{"name": name, "summary": summary} for name, summary in found.items()])


COMMANDS.add(
    Command(
        "configs",
        "list, print and copy the training files that ship",
        "List the training files that ship with tokensieve, print one, or copy one to change it. tokensieve train, search and "
        "validate take their names. A copy never replaces a file.",
        add_configs_flags,
        run_configs,
        usage="tokensieve configs [list | show NAME | copy NAME [DEST]] [options]",
        order=55,
        examples=(
            "tokensieve configs",
            "tokensieve configs show embedded_vlm",
            "tokensieve configs copy RGBNT201/DeMo_SDTPS my_reid.yml",
        ),
    ),
    origin=__name__,
)
