"""`tokensieve show`: draw which patches a plan keeps."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command, Result
from tokensieve.drawing.registry import SHOW_INPUTS
from tokensieve.evaluation.flags import WEIGHTS, model_type_flag
from tokensieve.flags import add_flags, integer_in


def add_show_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="; ".join(kind.summary for kind in SHOW_INPUTS.values()))
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="default: anchor(k=10,m=50,alpha=0.5); of re-identification what the model was trained with",
    )
    parser.add_argument("--compare", nargs="+", default=[], metavar="PLAN", help="more plans, side by side")
    for kind in SHOW_INPUTS.values():
        add_flags(parser, kind.flags)
    parser.add_argument(
        "--model", metavar="NAME", help="default: the embedded one; of re-identification also the folder of a training"
    )
    parser.add_argument("--pretrained", metavar="TAG", help="weights of the model")
    model_type_flag().add_to(parser)
    WEIGHTS.add_to(parser)
    parser.add_argument("--output", metavar="FILE", help="the PNG to write")
    parser.add_argument("--device", help="cpu, cuda, mps (default: the best there is)")
    parser.add_argument("--seed", type=integer_in(0, 2**32 - 1), default=0, help="default: 0")


def run_show(args: argparse.Namespace) -> Result:
    from tokensieve.drawing import show

    return Result({"files": [str(path) for path in show.run(args)]})


COMMANDS.add(
    Command(
        "show",
        "draw which patches are kept",
        "Draw into the image which patches a plan keeps, drops and merges, and by which scores.",
        add_show_flags,
        run_show,
        order=80,
        examples=(
            "tokensieve show photo.jpg --plan cover:32 --compare anchor:60 random:60",
            "tokensieve show embedded:3 embedded:12 --output kept-{image}.png",
            "tokensieve show embedded-reid:12 --gallery",
        ),
    ),
    origin=__name__,
)
