"""`tokensieve report`: make one HTML page of results."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command, Result
from tokensieve.flags import integer_in


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="RESULTS", help="JSON result files, or folders of them")
    parser.add_argument("--output", default="report.html", metavar="FILE", help="default: report.html")
    parser.add_argument("--title", help="the page's heading")
    parser.add_argument(
        "--plots",
        metavar="DIR",
        help="also write the plots there, each as PNG and SVG file: NUMBER-time.png, NUMBER-gflops.svg",
    )
    parser.add_argument(
        "--images", type=integer_in(0), default=2, metavar="N", help="example pictures for each model (default: 2)"
    )


def run_report(args: argparse.Namespace) -> Result:
    from tokensieve import report

    return Result({"file": str(report.run(args))})


COMMANDS.add(
    Command(
        "report",
        "make one HTML page of results",
        "Make one self-contained HTML page of result files.",
        add_report_flags,
        run_report,
        order=90,
        examples=(
            "tokensieve report results",
            "tokensieve report results --output report.html --title 'CLIP on my images'",
            "tokensieve report results/*.json --images 0",
        ),
    ),
    origin=__name__,
)
