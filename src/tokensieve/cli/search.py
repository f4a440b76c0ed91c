"""`tokensieve search`: train with many values of some keys, and keep the best."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file with search_settings")
    parser.add_argument("--output", metavar="DIR", help="folder of the search (default: the one the file names)")
    parser.add_argument("--quiet", action="store_true", help="no progress, no table")


def run_search(args: argparse.Namespace) -> None:
    from tokensieve import search

    search.run(args.config, output=args.output, quiet=args.quiet)


COMMANDS.add(
    Command(
        "search",
        "try values for keys of a YAML file",
        "Train what a YAML file describes with many values of the keys that its search_settings name, and keep the best. "
        "The same command again goes on with a search that was stopped.",
        add_search_flags,
        run_search,
        order=70,
    ),
    origin=__name__,
)
