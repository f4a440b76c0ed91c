"""`tokensieve families`: list which models can be cut, and where."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command, Result


def add_families_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", metavar="FILE", help="also write the table as Markdown")


def run_families(args: argparse.Namespace) -> Result:
    from tokensieve.measuring import families

    return Result(families.run(args))


COMMANDS.add(
    Command(
        "families",
        "list which models can be cut, and where",
        "Try a small model of every family and list what can be cut where.",
        add_families_flags,
        run_families,
        order=100,
        examples=("tokensieve families", "tokensieve families --output families.md", "tokensieve families --json"),
    ),
    origin=__name__,
)
