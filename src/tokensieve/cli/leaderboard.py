"""`tokensieve leaderboard`: methods compared at equal measured time, from files that anyone can add to."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command, Result

ACTIONS = ("show", "add", "page")
FOLDER = "benchmarks/results/leaderboard"


def add_leaderboard_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=ACTIONS,
        metavar=f"{{{','.join(ACTIONS)}}}",
        help="print the rows, add files of rows, make an HTML page",
    )
    parser.add_argument("files", nargs="*", default=[], metavar="FILE", help="of add: files of rows")
    parser.add_argument("--folder", default=FOLDER, metavar="DIR", help=f"the files of the leaderboard (default: {FOLDER})")
    parser.add_argument("--output", default="leaderboard.html", metavar="FILE", help="of page (default: leaderboard.html)")


def run_leaderboard(args: argparse.Namespace) -> Result:
    from tokensieve.leaderboard import commands

    return Result(commands.run(args))


COMMANDS.add(
    Command(
        "leaderboard",
        "compare methods at equal measured time",
        "Show the rows of the leaderboard, add checked files of rows to it, or make one self-contained HTML page of it.",
        add_leaderboard_flags,
        run_leaderboard,
        order=95,
        examples=(
            "tokensieve leaderboard show",
            "tokensieve leaderboard page --output leaderboard.html",
            "tokensieve leaderboard add results/*.json",
        ),
    ),
    origin=__name__,
)
