"""`tokensieve eval`: evaluate models on data sets under plans."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command
from tokensieve.evaluation.flags import DEFAULTS_RULE, eval_flags
from tokensieve.flags import add_flags


def add_eval_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that all tasks share, then those of the tasks, under their headings."""
    for title, flags in eval_flags().items():
        add_flags(parser.add_argument_group(title), flags)


def run_eval(args: argparse.Namespace) -> None:
    from tokensieve.evaluation import run

    run.run(args)


COMMANDS.add(
    Command(
        "eval",
        "evaluate models with and without token reduction",
        "Evaluate models on data sets under one or several plans. Without arguments: the model that ships with the "
        f"package on its own test set, full and with the plans anchor, random and grid. {DEFAULTS_RULE}",
        add_eval_flags,
        run_eval,
        usage="tokensieve eval [--dataset NAME ...] [--model NAME ...] [--plan PLAN] [FLAGS]",
        order=10,
    ),
    origin=__name__,
)
