"""`tokensieve serve`: vLLM's OpenAI server with a plan."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tokensieve.cli.registry import COMMANDS, Command
from tokensieve.embedded import LLAVA


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    about = "a folder, or OWNER/NAME on the Hub (default: the embedded LLaVA)"
    parser.add_argument("model", nargs="?", default=LLAVA, metavar="MODEL", help=about)
    parser.add_argument("--plan", metavar="PLAN", help="default: cover at 25%% of the image tokens; none cuts nothing")
    parser.add_argument(
        "--positions",
        choices=("original", "compact"),
        help="of the tokens that stay: as if nothing was cut (default), or numbered anew",
    )


def split_serve_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of this command, and those of vLLM."""
    from tokensieve.serving.launch import split_words

    return split_words(words)


def run_serve(args: argparse.Namespace) -> None:
    from tokensieve.serving import launch

    launch.run(args.model, args.plan, args.positions, args.passed_on)


COMMANDS.add(
    Command(
        "serve",
        "serve a vision-language model with vLLM under a plan",
        "Start vLLM's OpenAI server with fewer image tokens. The plan is checked first. It listens on 127.0.0.1, port 8000, "
        "unless vLLM's flags --host and --port say otherwise. All other flags go to vLLM as they are, behind MODEL.",
        add_serve_flags,
        run_serve,
        usage="tokensieve serve [MODEL] [--plan PLAN] [--positions WHICH] [VLLM FLAGS]",
        order=95,
        examples=(
            "tokensieve serve",
            "tokensieve serve llava-hf/llava-1.5-7b-hf --plan cover:25%",
            "tokensieve serve Qwen/Qwen2.5-VL-3B-Instruct --plan cover:50% --positions compact",
        ),
        split=split_serve_words,
    ),
    origin=__name__,
)
