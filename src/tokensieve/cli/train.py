"""`tokensieve train`: train what a YAML file describes, or search if the file turns a search on."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", metavar="DIR", help="folder of the run (default: the one the file names)")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run_train(args: argparse.Namespace) -> None:
    from tokensieve import config

    if config.load(args.config).searches:
        from tokensieve import search

        search.run(args.config, output=args.output, quiet=args.quiet)
    else:
        from tokensieve import training

        training.run(args.config, resume=args.resume, quiet=args.quiet, output=args.output)


COMMANDS.add(
    Command(
        "train",
        "train what a YAML file describes",
        "Train what a YAML file describes.",
        add_train_flags,
        run_train,
        order=50,
    ),
    origin=__name__,
)
