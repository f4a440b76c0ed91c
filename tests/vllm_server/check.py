"""Checks real vLLM servers under plans, against what transformers with tokensieve answers. Run in vLLM's virtual environment.

    python -m tests.vllm_server.questions FOLDER    in the project's environment
    python -m tests.vllm_server.check FOLDER        in vLLM's

Each check prints one line, and the program ends with 1 if one failed. No process stays behind. Two jobs run at a time: a server
is slow to start, and a start keeps one core busy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.vllm_server.answers import check_answers, check_caches, check_streaming, check_two_images
from tests.vllm_server.bad_input import check_bad_input
from tests.vllm_server.reporting import attempt, failures, report
from tests.vllm_server.server import environment, running, start
from tests.vllm_server.starts import check_curl, check_kill_and_restart, check_refusals, check_taken_port, check_untouched

COVER = "cover@out:49(sizes=no)"
ONE_PROCESS = ("--distributed-executor-backend", "uni")  # of the engine, which starts sooner
FLAGS = {  # of the servers under these plans, so that every feature is on under some plan
    COVER: ("--block-size", "32"),  # of the prefix cache; a CPU's default, 128, is longer than prompts
    "anchor@out:49": ("--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--tensor-parallel-size", "2"),  # in chunks
    "visionzip@out:64": ("--no-enable-prefix-caching", *ONE_PROCESS),
    "divprune@llm.0:40": ("--mm-processor-cache-gb", "0", *ONE_PROCESS),
}


def check_plan(folder: Path, data: dict[str, Any], plan: str) -> None:
    server = start(folder, f"server-{plan.partition('@')[0]}", "--plan", plan, *FLAGS.get(plan, ()))
    with running(server):
        check_answers(server, data, plan)
        check_two_images(server, data, plan)
        if plan == "none":
            check_untouched(folder, server, data)
        if plan == COVER:
            check_streaming(server, data, plan)
            check_caches(server, data, plan)
            check_bad_input(server, data, plan)
            check_curl(folder, server, data)
            check_taken_port(server)
            check_kill_and_restart(folder, server, data, plan)


def check_offline(folder: Path) -> None:
    """Other families, by vLLM's engine without a server, in a process of its own."""
    command = [sys.executable, "-m", "tests.vllm_server.offline", str(folder)]
    log = folder / "offline.log"
    with log.open("w") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(), timeout=1800)
    for line in done.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word in ("ok", "FAILED"):
            report(rest.strip(), word == "ok")
    if done.returncode:
        report("engines without a server", False, f"ended with {done.returncode}; see {log}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", help="names of jobs: plans, families, refusals")
    args = parser.parse_args()
    folder = args.folder.resolve()
    data = json.loads((folder / "llava.json").read_text())
    plans = sorted(data["answers"], key=lambda plan: plan not in (COVER, "none"))  # the longest jobs first
    jobs: dict[str, Callable[[], None]] = {plan: lambda plan=plan: check_plan(folder, data, plan) for plan in plans}
    jobs |= {"families": lambda: check_offline(folder), "refusals": lambda: check_refusals(folder)}
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        for name in args.only or jobs:
            pool.submit(attempt, name, jobs[name])
    minutes = (time.monotonic() - begin) / 60
    print(f"{'all checks passed' if not failures else f'{len(failures)} failed: ' + '; '.join(failures)} ({minutes:.1f} min)")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
