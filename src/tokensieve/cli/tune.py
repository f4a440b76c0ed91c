"""`tokensieve tune`: find the plan for a model and a user's own images, without labels."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command, Result
from tokensieve.evaluation.flags import model_type_flag
from tokensieve.flags import integer_in


def add_tune_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="default: the embedded model of its type, sieve-vit-8")
    parser.add_argument("--pretrained", metavar="TAG", help="weights of the model")
    model_type_flag().add_to(parser)
    parser.add_argument(
        "--images",
        "--dataset",
        nargs="+",
        metavar="PATH",
        help="folders and files, or your own data as folder:DIR, csv:FILE, images:DIR (default: the images that ship with an "
        "embedded model)",
    )
    parser.add_argument("--questions", metavar="FILE", help="of vision-language models: one question a line; they take turns")
    goal = parser.add_argument_group("goal (one or both)")
    goal.add_argument("--speedup", type=float, metavar="X", help="the plan is measured to be so much faster (default: 2)")
    goal.add_argument("--keep", type=integer_in(1), metavar="N", help="tokens left at the end of the tower; no default")
    how = parser.add_argument_group("how to search")
    how.add_argument("--methods", type=names, metavar="A,B", help="search these only; resize is one of them (default: all)")
    how.add_argument("--budget_minutes", type=minutes, default=3.0, metavar="M", help="after loading the model (default: 3)")
    how.add_argument(
        "--trials", type=integer_in(1), default=150, metavar="N", help="plans to try on a few images (default: 150)"
    )
    how.add_argument("--limit", type=integer_in(8), default=256, metavar="N", help="images at most, 8 or more (default: 256)")
    how.add_argument("--batch_size", type=integer_in(1), default=16, metavar="N", help="default: 16")
    how.add_argument("--device", help="cpu, cuda, mps (default: the best there is)")
    how.add_argument("--seed", type=integer_in(0, 2**31 - 1), default=0, help="default: 0")
    parser.add_argument(
        "--output", metavar="DIR", help="folder of the study, the plot and tune.json (default: results/tune/MODEL)"
    )


def names(text: str) -> list[str]:
    """An argument type: names separated by commas."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError("no method is named; for example --methods cover,resize")
    return found


def minutes(word: str) -> float:
    """An argument type: a number of minutes above 0."""
    try:
        number = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of minutes") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is not above 0")
    return number


def run_tune(args: argparse.Namespace) -> Result:
    from tokensieve import files
    from tokensieve.tuning import run

    path = run.run(args)
    return Result({"file": str(path), **files.read_json(path)})


COMMANDS.add(
    Command(
        "tune",
        "find the plan for your model and your images, without labels",
        "Find the plan that changes the outputs of a model least on your images, at a given speed-up or number of tokens. "
        "No labels are needed. The same command again goes on with a search that was stopped.",
        add_tune_flags,
        run_tune,
        usage="tokensieve tune [--model NAME] [--images PATH ...] [--speedup X] ...",
        order=45,
        examples=(
            "tokensieve tune",
            "tokensieve tune --model ViT-B-16 --pretrained openai --images photos --speedup 2",
            "tokensieve tune --model sieve-llava-8 --keep 40 --budget_minutes 10",
        ),
    ),
    origin=__name__,
)
