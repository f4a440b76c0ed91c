"""`tokensieve demo`: a page in the browser to try plans on images."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command
from tokensieve.evaluation.flags import WEIGHTS, model_type_flag
from tokensieve.flags import integer_in


def add_demo_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="a model of your own (default: the three embedded ones)")
    parser.add_argument("--pretrained", metavar="TAG", help="weights of the model")
    model_type_flag().add_to(parser)
    parser.set_defaults(model_type=None)  # that of the model's name where it is a model of one type only
    WEIGHTS.add_to(parser)
    parser.add_argument("--port", type=integer_in(0, 65535), default=7860, help="default: 7860; 0: any that is free")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine only")
    parser.add_argument("--device", help="cpu, cuda, mps (default: the best there is)")


def run_demo(args: argparse.Namespace) -> int:
    from tokensieve.demo import serve

    return serve.run(args)


COMMANDS.add(
    Command(
        "demo",
        "try plans on images in a browser",
        "Serve a page on this machine on which plans are tried on images: what they keep, what the model says, what it costs.",
        add_demo_flags,
        run_demo,
        order=85,
        examples=(
            "tokensieve demo",
            "tokensieve demo --model ViT-B-16 --pretrained openai --port 8080",
            "tokensieve demo --model sieve-llava-8",
        ),
    ),
    origin=__name__,
)
