"""Requests per second, time to first token and KV-cache tokens of a LLaVA in vLLM, without a plan and under three.

    .venv-vllm/bin/python benchmarks/serving.py --output benchmarks/results/serving.json

Run it in vLLM's virtual environment (`make test-vllm` makes it), from the root of the repository. One server for each plan runs
all the time, and only one is asked at a time: in every round, each plan gets the same new images, at each number of requests
at a time. No server has seen an image of a round before, so its caches do not help.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.vllm_server.server import Client, Server, running

PLANS = ("none", "cover@out:50%", "cover@out:25%", "cover@out:10%")
AT_A_TIME = (1, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", default="sieve-llava-8", help="a folder, or the embedded LLaVA")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="of one request at a time; 8 times as many at 8 and at 32")
    args = parser.parse_args()
    if args.output.exists():
        sys.exit(f"{args.output} exists; results are never replaced")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {
            plan: stack.enter_context(running(Path(folder), f"server-{number}", args.model, "--plan", plan))
            for number, plan in enumerate(PLANS)
        }
        for server in servers.values():
            server.model = args.model
            measure(server, 8, images(0, 8))  # the first requests take longer
        blocks = {plan: kv_tokens(server) for plan, server in servers.items()}
        seen = 8
        for turn in range(args.rounds):
            for at_a_time in AT_A_TIME:
                count = args.requests * (1 if at_a_time == 1 else 8)
                asked = images(seen, count)
                seen += count
                order = PLANS[turn % len(PLANS) :] + PLANS[: turn % len(PLANS)]
                for plan in order:
                    rows.append(
                        {"plan": plan, "at_a_time": at_a_time, "round": turn, **measure(servers[plan], at_a_time, asked)}
                    )
                    print(rows[-1], flush=True)
    args.output.write_text(json.dumps({"meta": describe(args), "kv_tokens": blocks, "rows": rows}, indent=1) + "\n")


def describe(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import vllm

    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "model": args.model,
        "rounds": args.rounds,
        "requests": args.requests,
        "cores": os.cpu_count(),
        "versions": versions,
    }


def images(first: int, count: int) -> list[tuple[str, str]]:
    """Embedded test scenes with their questions."""
    from tokensieve.embedded.datasets import EmbeddedQuestions

    scenes, made = EmbeddedQuestions("test"), []
    for number in range(first, first + count):
        image, question = scenes[number % len(scenes)]
        file = io.BytesIO()
        image.save(file, "PNG")
        made.append(("data:image/png;base64," + base64.b64encode(file.getvalue()).decode(), question.text))
    return made


def measure(server: Server, at_a_time: int, asked: list[tuple[str, str]]) -> dict[str, float]:
    """One load on one server."""

    async def load() -> tuple[list[tuple[str, int, float]], float, int]:
        client = Client(server, at_a_time)
        begin = time.perf_counter()
        replies = await asyncio.gather(*(client.stream([image], question) for image, question in asked))
        seconds = time.perf_counter() - begin
        reply = await client.ask([asked[0][0]], asked[0][1], max_tokens=1)
        return replies, seconds, reply.usage.prompt_tokens

    replies, seconds, tokens = asyncio.run(load())
    return {
        "requests_per_second": len(asked) / seconds,
        "first_token_seconds": statistics.median(first for _, _, first in replies),
        "prompt_tokens": tokens,
    }


def kv_tokens(server: Server) -> int:
    """How many tokens fit into the KV cache of a server, by its log."""
    for line in server.log.read_text(errors="replace").splitlines():
        if "KV cache size:" in line:
            return int(line.partition("KV cache size:")[2].split()[0].replace(",", ""))
    return 0


if __name__ == "__main__":
    main()
