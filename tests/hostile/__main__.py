"""`python -m tests.hostile`: the long form of the hostile tries. Prints tries and failures of each class.

python -m tests.hostile --tries 5000 --seed 7               all classes
python -m tests.hostile --classes plans --seed 7 --only 123  repeats one try
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.hostile.attack import Failure, find_attacks, run_chunk

CHUNK = 50  # tries that a worker process runs before it takes others


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--tries", type=int, default=5000, help="tries of each class; expensive classes get fewer")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument("--classes", nargs="+", choices=sorted(find_attacks()), help="default: all")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="repeats these tries")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--output", type=Path, help="a JSON file for the numbers")
    args = parser.parse_args()
    seed = time.time_ns() % 1_000_000 if args.seed is None else args.seed
    attacks = [attack for name, attack in find_attacks().items() if args.classes is None or name in args.classes]
    print(f"seed {seed}")
    jobs = []
    for attack in attacks:
        numbers = list(range(attack.n_tries(args.tries))) if args.only is None else args.only
        jobs += [(attack.name, numbers[start : start + CHUNK]) for start in range(0, len(numbers), CHUNK)]
    jobs.sort(key=lambda job: find_attacks()[job[0]].per_thousand)  # the expensive ones first
    tries, failures, seconds = Counter[str](), list[Failure](), Counter[str]()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        waiting = {pool.submit(run_chunk, name, seed, numbers): (name, len(numbers)) for name, numbers in jobs}
        for done in as_completed(waiting):
            name, n = waiting[done]
            failed, took = done.result()
            tries[name] += n
            seconds[name] += took
            failures += failed
            for failure in failed:
                print(failure, flush=True)
            if sys.stderr.isatty():
                print(f"\r{sum(tries.values()):,} tries, {len(failures)} failed ", end="", file=sys.stderr)
    rows = [(a.name, a.summary, tries[a.name], sum(f.attack == a.name for f in failures), seconds[a.name]) for a in attacks]
    _print_table(rows)
    if args.output is not None:
        keys = ("class", "summary", "tries", "failures", "seconds")
        classes = [dict(zip(keys, row, strict=True)) for row in rows]
        content = {"seed": seed, "classes": classes, "failures": list(map(str, failures))}
        args.output.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failures else 0


def _print_table(rows: list[tuple[str, str, int, int, float]]) -> None:
    width = max(len(row[0]) for row in rows)
    print(f"{'class':{width}}  {'tries':>7}  {'failed':>6}  {'seconds':>7}")
    total = ("all", "", sum(row[2] for row in rows), sum(row[3] for row in rows), sum(row[4] for row in rows))
    for name, _, n, failed, took in (*rows, total):
        print(f"{name:{width}}  {n:>7,}  {failed:>6}  {took:>7.0f}")


if __name__ == "__main__":
    sys.exit(main())
