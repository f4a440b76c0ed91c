"""Does torch.compile pay for a tower with a plan? Compiled and eager calls in interleaved rounds, by CPU time of one thread.

    python benchmarks/compile_time.py     # ViT-B/16, one cut and twelve cuts, batch 1 and 16

A plan is attached first, then the tower is compiled once for each shape. The table of docs/speed.md is made from the file.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch import Tensor

import tokensieve
from tokensieve import files, provenance

MODEL = "ViT-B-16"
PLANS = ("none", "cover@6:49", "pool@*.attn:-8")
DEFAULT = Path(__file__).parent / "results" / "compile_time.json"


def measure(tower: Any, plan: str, images: Tensor, rounds: int) -> dict[str, Any]:
    """Seconds of the eager and of the compiled tower with a plan."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad(), tokensieve.apply(tower, plan) as handle, handle.call(samples=torch.arange(len(images))):
        compiled: Callable[[Tensor], Tensor] = torch.compile(tower)
        eager_out = tower(images)
        started = time.perf_counter()
        compiled_out = compiled(images)
        compile_seconds = time.perf_counter() - started
        compiled(images)
        calls = {"eager": tower, "compiled": compiled}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds):
            for name in sorted(calls, reverse=bool(number % 2)):
                begin = time.thread_time()
                calls[name](images)
                seconds[name].append(time.thread_time() - begin)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    ratios = sorted(slow / fast for slow, fast in zip(seconds["eager"], seconds["compiled"], strict=True))
    return {
        "plan": plan,
        "batch_size": len(images),
        "seconds_eager": statistics.median(seconds["eager"]),
        "seconds_compiled": statistics.median(seconds["compiled"]),
        "speedup": statistics.median(ratios),
        "speedup_low": ratios[len(ratios) // 4],
        "speedup_high": ratios[-1 - len(ratios) // 4],
        "compile_seconds": compile_seconds,
        "graphs": graphs,
        "largest_difference": float((eager_out - compiled_out).abs().max()),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT)
    parser.add_argument("--batch_size", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    torch.manual_seed(0)
    tower = open_clip.create_model(MODEL).visual.eval()
    for batch in args.batch_size:
        images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        for plan in PLANS:
            rows.append({"model": MODEL} | measure(tower, plan, images, args.rounds))
            print(f"batch {batch}, {plan}: {rows[-1]['speedup']:.2f}x, {rows[-1]['compile_seconds']:.0f} s", flush=True)
    files.write_json(args.output, {"rows": rows, "versions": provenance.versions()})


if __name__ == "__main__":
    main()
