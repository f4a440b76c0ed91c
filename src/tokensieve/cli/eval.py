"""`tokensieve eval`: evaluate models on data sets under plans."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command, Result
from tokensieve.evaluation.flags import DEFAULTS_RULE, eval_flags
from tokensieve.flags import add_flags


def add_eval_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that all tasks share, then those of the tasks, under their headings."""
    for title, flags in eval_flags().items():
        add_flags(parser.add_argument_group(title), flags)


def run_eval(args: argparse.Namespace) -> Result:
    from tokensieve.evaluation import run

    return Result(run.run(args))


COMMANDS.add(
    Command(
        "eval",
        "evaluate models with and without token reduction",
        "Evaluate models on data sets under one or several plans. Without arguments: the model that ships with the "
        "package on its own test set under eight plans: all tokens, cover, anchor, random, grid, a smaller image. "
        f"{DEFAULTS_RULE}",
        add_eval_flags,
        run_eval,
        usage="tokensieve eval [--dataset NAME ...] [--model NAME ...] [--plan PLAN] ...",
        order=10,
        examples=(
            "tokensieve eval",
            "tokensieve eval --plan cover:32 --compare none random:32 --limit 1000",
            "tokensieve eval --model ViT-B-16 --pretrained openai --dataset cifar10 --plan 2x --compare none",
        ),
    ),
    origin=__name__,
)
