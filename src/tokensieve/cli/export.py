"""`tokensieve export`: write an image tower with its plan to a file."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command, Result
from tokensieve.evaluation.flags import WEIGHTS, model_type_flag


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="default: the embedded model of its type, sieve-vit-8")
    parser.add_argument("--pretrained", metavar="TAG", help="weights of the model")
    model_type_flag().add_to(parser)
    parser.add_argument("--plan", required=True, metavar="PLAN", help="for example 'anchor@6:60'; none: the full tower")
    WEIGHTS.add_to(parser)
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="NAME.onnx, or NAME.pt2 for torch.export.load; an older file is kept"
    )


def run_export(args: argparse.Namespace) -> Result:
    from tokensieve.exporting import run

    run.run(args)
    return Result({"file": args.output, "plan": args.plan})


COMMANDS.add(
    Command(
        "export",
        "write an image tower with a plan as ONNX or torch.export file",
        "Write the image tower of a model, with a plan inside and for batches of any size, to a file that runs without "
        "tokensieve. The file is compared with the model on random images before it is written. Of a LLaVA "
        "(--model_type vlm) it is the tower with the projector. Needs pip install 'tokensieve[export]' for ONNX.",
        add_export_flags,
        run_export,
        usage="tokensieve export --plan PLAN --output FILE [--model NAME] [FLAGS]",
        order=47,
        examples=(
            "tokensieve export --plan cover@4:60 --output tower.onnx",
            "tokensieve export --plan none --output full.pt2",
            "tokensieve export --model ViT-B-16 --pretrained openai --plan 2x --output tower.onnx",
        ),
    ),
    origin=__name__,
)
