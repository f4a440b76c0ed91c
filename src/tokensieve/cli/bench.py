"""`tokensieve bench`: measure the speed of plans."""

from __future__ import annotations

import argparse
import os

from tokensieve.cli.registry import COMMANDS, Command
from tokensieve.evaluation.flags import WEIGHTS, model_type_flag
from tokensieve.flags import integer_in
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.registry import resolve


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="name of an architecture (default: the ViT-B/16 of its type); with --model_type vlm a folder or a Hub id "
        "(default: sieve-llava-8)",
    )
    model_type_flag().add_to(parser)
    parser.add_argument("--pretrained", default="", metavar="TAG", help="weights (default: random ones; speed is the same)")
    parser.add_argument(
        "--plan", nargs="+", metavar="PLAN", help="plans to measure (default: anchor(k=10,m=50); with vlm anchor@out:50%%)"
    )
    parser.add_argument("--batch_size", nargs="+", type=integer_in(1), metavar="N", help="default: 16; with vlm 1 and 16")
    parser.add_argument("--repeats", type=integer_in(1), default=10, help="rounds of the interleaved run (default: 10)")
    WEIGHTS.add_to(parser)
    parser.add_argument("--image_size", type=integer_in(1), metavar="PIXELS", help="default: the model's own")
    vlm = parser.add_argument_group("vision-language models (--model_type vlm)")
    vlm.add_argument("--new_tokens", type=integer_in(1), default=16, metavar="N", help="tokens to generate (default: 16)")
    vlm.add_argument("--text_tokens", type=integer_in(2), default=16, metavar="N", help="words of the prompt (default: 16)")
    vlm.add_argument(
        "--break_even",
        action="store_true",
        help="also find from how many vision tokens on a plan is faster, on models of this shape with random weights, one at a "
        "time, each beside the model itself: twice its memory",
    )
    parser.add_argument("--device", help="cpu, cuda, mps (default: the best there is)")
    parser.add_argument("--output", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress, no table")


def run_bench(args: argparse.Namespace) -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # before torch is imported: keeps its profiler from logging
    resolve(MODEL_TYPES.get_or_fail(args.model_type).bench)(args)


COMMANDS.add(
    Command(
        "bench",
        "measure speed against the unreduced model and the oracle",
        "Measure plans in one interleaved run: time, memory and GFLOPs against the unreduced model, and against the "
        "oracle (the same number of tokens, chosen at no cost).",
        add_bench_flags,
        run_bench,
        order=40,
    ),
    origin=__name__,
)
