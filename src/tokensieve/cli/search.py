"""`tokensieve search`: train with many values of some keys, and keep the best."""

from __future__ import annotations

import argparse

from tokensieve.cli import overrides
from tokensieve.cli.registry import COMMANDS, Command, Result
from tokensieve.flags import WANDB


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file with search_settings, or the name of a shipped one")
    parser.add_argument("values", nargs="*", metavar="KEY=VALUE", help=overrides.HELP)
    parser.add_argument("--output", metavar="DIR", help="folder of the search (default: the one the file names)")
    WANDB.add_to(parser)


def run_search(args: argparse.Namespace) -> Result:
    from tokensieve import search

    values = overrides.read_overrides(args.values)
    folder = search.run(args.config, output=args.output, quiet=args.quiet, overrides=values, wandb=args.wandb)
    return Result(search.summary(folder))


COMMANDS.add(
    Command(
        "search",
        "try values for keys of a YAML file",
        "Train what a YAML file describes with many values of the keys that its search_settings name, and keep the best. "
        "The same command again goes on with a search that was stopped.",
        add_search_flags,
        run_search,
        usage="tokensieve search [options] CONFIG [KEY=VALUE ...]",
        order=70,
        examples=(
            "tokensieve search embedded_vlm",
            "tokensieve search embedded_vlm search_settings.n_trials=8 --output outputs/try",
            "tokensieve search my.yaml optimizer.lr=1e-4 --json",
        ),
    ),
    origin=__name__,
)
