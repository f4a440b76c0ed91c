"""`tokensieve validate`: check YAML files without training anything."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command


def add_validate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="YAML files")


def run_validate(args: argparse.Namespace) -> int:
    from tokensieve import config

    return config.validate(args.files)


COMMANDS.add(
    Command(
        "validate",
        "check YAML files and list all errors",
        "Check YAML files and list all errors, one a line with its place, without training anything.",
        add_validate_flags,
        run_validate,
        order=60,
    ),
    origin=__name__,
)
