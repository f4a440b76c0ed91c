"""`tokensieve bench`: measure the speed of plans."""

from __future__ import annotations

import argparse
import os

from tokensieve.cli.registry import COMMANDS, Command, Result
from tokensieve.errors import UserError
from tokensieve.evaluation.flags import WEIGHTS, model_type_flag
from tokensieve.flags import integer_in
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.registry import resolve

REPEATS = 10
SUITE = "tokensieve.measuring.suite:bench"
FAMILIES = "tokensieve.measuring.family_bench:bench"


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="name of an architecture (default: the ViT-B/16 of its type); with --model_type vlm a folder or a Hub id "
        "(default: sieve-llava-8), with reid the folder of a training (default: sieve-reid-6)",
    )
    model_type_flag().add_to(parser)
    parser.add_argument("--pretrained", default="", metavar="TAG", help="weights (default: random ones; speed is the same)")
    parser.add_argument(
        "--plan",
        nargs="+",
        metavar="PLAN",
        help="plans to measure (default: anchor(k=10,m=50); with vlm anchor@out:50%%; with reid that of the model)",
    )
    parser.add_argument("--batch_size", nargs="+", type=integer_in(1), metavar="N", help="default: 16; with vlm 1 and 16")
    parser.add_argument(
        "--repeats",
        type=integer_in(1),
        metavar="N",
        help="rounds of the interleaved run (default: 10; in the suite 7, 4, 2)",
    )
    parser.add_argument(
        "--threads", type=integer_in(1), metavar="N", help="of torch (default: on the CPU 1, which CPU time needs; else all)"
    )
    parser.add_argument(
        "--break_even",
        action="store_true",
        help="also find from how many vision tokens on a plan is faster, on models of this shape with random weights, one at a "
        "time, each beside the model itself: twice its memory",
    )
    WEIGHTS.add_to(parser)
    parser.add_argument("--image_size", type=integer_in(1), metavar="PIXELS", help="default: the model's own")
    parser.add_argument(
        "--images",
        "--dataset",
        nargs="+",
        metavar="PATH",
        help="your images in place of noise: folders, files, folder:DIR, csv:FILE, images:DIR; the model is loaded with its "
        "transform",
    )
    vlm = parser.add_argument_group("vision-language models (--model_type vlm)")
    vlm.add_argument("--new_tokens", type=integer_in(1), default=16, metavar="N", help="tokens to generate (default: 16)")
    vlm.add_argument("--text_tokens", type=integer_in(2), default=16, metavar="N", help="words of the prompt (default: 16)")
    vlm.add_argument(
        "--family",
        nargs="+",
        metavar="NAME",
        help="measure families (qwen3_vl, internvl, ... or all) with random weights, under --plan (default: one cut at @out, "
        "one at @llm.2)",
    )
    vlm.add_argument(
        "--vision_tokens",
        nargs="+",
        type=integer_in(16),
        metavar="N",
        help="with --family: image tokens of a prompt, about (default: 576 2304 9216)",
    )
    vlm.add_argument(
        "--width", type=integer_in(64), metavar="D", help="with --family: of the language model of 4 layers (default: 1024)"
    )
    suite = parser.add_argument_group("all kinds of plans on all families")
    suite.add_argument(
        "--suite",
        action="store_true",
        help="measure plans of every kind on models of every family at batch sizes 1, 4 and 16, about 15 minutes of one core; "
        "--model and --batch_size choose a part of it (--output: results/bench_suite.json)",
    )
    suite.add_argument("--quick", action="store_true", help="with --suite or --family: tiny models and one round, to try it")
    parser.add_argument(
        "--against",
        metavar="FILE",
        help="tell what became slower or faster since an earlier bench with these flags, from its JSON",
    )
    parser.add_argument("--device", help="cpu, cuda, mps (default: the best there is)")
    parser.add_argument("--output", metavar="FILE", help="also write the rows as JSON")


def run_bench(args: argparse.Namespace) -> Result:
    for variable, level in (("KINETO_LOG_LEVEL", "9"), ("TORCH_CPP_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(variable, level)  # before torch is imported: keeps its profiler from logging
    if args.quick and not (args.suite or args.family):
        raise UserError("--quick is a short form of --suite and --family; for fewer rounds use --repeats")
    if args.family and args.model_type != "vlm":
        raise UserError("--family measures vision-language models; add --model_type vlm")
    if not args.family and (args.vision_tokens or args.width):
        raise UserError("--vision_tokens and --width go with --family alone: other models have their own")
    if args.suite and args.images:
        raise UserError("--images does not go with --suite, which measures models of many sizes on noise; leave it out")
    from tokensieve.measuring import against

    before = None if args.against is None else against.read(args.against)
    args.repeats = args.repeats if args.suite else args.repeats or REPEATS
    own = MODEL_TYPES.get_or_fail(args.model_type).bench
    rows = resolve(FAMILIES if args.family else SUITE if args.suite else own)(args)
    if before is not None:
        if rows is None:
            raise UserError(f"--against needs rows to compare, but the bench of --model_type {args.model_type} tells none")
        against.print_comparison(args.against, against.compare(before, rows))
    return Result({"rows": rows})


COMMANDS.add(
    Command(
        "bench",
        "measure speed against the unreduced model and the oracle",
        "Measure plans in one interleaved run: time, memory and GFLOPs against the unreduced model, and against the "
        "oracle (the same number of tokens, chosen at no cost). On the CPU, times are CPU time of one thread.",
        add_bench_flags,
        run_bench,
        order=40,
        examples=(
            "tokensieve bench --plan cover:32 2x --batch_size 1 16",
            "tokensieve bench --model_type hf --model openai/clip-vit-base-patch16 --plan anchor@6:60",
            "tokensieve bench --model_type vlm --plan cover@out:40 --output bench.json",
            "tokensieve bench --model_type vlm --family all --vision_tokens 576 2304",
        ),
    ),
    origin=__name__,
)
