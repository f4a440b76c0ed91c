"""The cost of `cover` as a share of one ViT-B/16 block: choosing, merging, and both. 196 patches, one thread, interleaved.

python benchmarks/cover_speed.py --output benchmarks/results/cover_speed.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokensieve import View, files, provenance
from tokensieve.methods.cover import cover
from tokensieve.models import loading
from tokensieve.models.registry import open_tower

KEEPS = (8, 16, 32, 60, 98)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    block = open_tower(loading.architecture("ViT-B-16", "").eval()).blocks[0].module
    x = torch.randn(args.batch_size, 197, 768, generator=torch.Generator().manual_seed(0))
    view = View(tokens=x[:, 1:].contiguous(), prefix=x[:, :1], grid=(14, 14))
    calls: dict[str, Callable[[], Any]] = {"block": lambda: block(x)}
    for keep in KEEPS:
        reduction = cover(view, keep)
        calls[f"choose {keep}"] = lambda keep=keep: cover(view, keep)
        calls[f"merge {keep}"] = lambda reduction=reduction: reduction.apply(view.tokens)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for _ in range(args.repeats + 2):
            for name, call in calls.items():
                started = time.process_time()
                call()
                seconds[name].append(time.process_time() - started)
    rows = []
    for keep in KEEPS:
        share = {
            what: statistics.median(a / b for a, b in zip(seconds[f"{what} {keep}"][2:], seconds["block"][2:], strict=True))
            for what in ("choose", "merge")
        }
        rows.append({"keep": keep, **share, "both": share["choose"] + share["merge"]})
        print(f"K = {keep}: choose {share['choose']:.1%}, merge {share['merge']:.1%} of a block")
    files.write_json(args.output, {"batch_size": args.batch_size, "rows": rows, "versions": provenance.versions()})


if __name__ == "__main__":
    main()
