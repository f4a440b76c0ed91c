"""`tokensieve build`: fold result files into one CSV."""

from __future__ import annotations

import argparse
from pathlib import Path

from tokensieve.cli.registry import COMMANDS, Command, Result
from tokensieve.files import is_stream


def add_build_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", help="JSON result files, or folders of them")
    parser.add_argument("--output", default="benchmark.csv", metavar="FILE", help="default: benchmark.csv")


def run_build(args: argparse.Namespace) -> Result:
    from tokensieve.evaluation import csv_table

    rows = csv_table.build_csv(args.files, args.output)
    if not args.quiet and not is_stream(Path(args.output)):
        print(f"{rows} results in {args.output}")
    return Result({"file": args.output, "results": rows})


COMMANDS.add(
    Command(
        "build",
        "fold result files into one CSV",
        "Fold JSON result files into one CSV file.",
        add_build_flags,
        run_build,
        order=20,
        examples=(
            "tokensieve build results",
            "tokensieve build results/*.json --output benchmark.csv",
            "tokensieve build results --output /dev/stdout",
        ),
    ),
    origin=__name__,
)
