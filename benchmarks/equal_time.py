"""Plans at equal measured time: accuracy and distance to the full model's feature over the speed-up of the tower.

    python benchmarks/equal_time.py --split val --plans cover@2:48 "resize(size=80)" --output FILE.json
    python benchmarks/equal_time.py --model CLIP_FOLDER --model_type hf --dataset wds/photos --dataset_root PHOTOS \\
        --load_clfs CLASSIFIER --output benchmarks/results/equal_time_clip.json --plans 2x "resize(size=160)" tome:-16 ...

Every batch is encoded under every plan in turn, in an order that rotates from batch to batch, in one thread. A speed-up is the
median over batches of the ratio of CPU times within a batch. 1 - cos is the distance to the full model's feature. Standard
errors are over images; of lost accuracy, those of the paired difference. `versus` has for each pair of plans the paired
difference of the distances and of the hits (the first plan minus the second).
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
import warnings
from typing import Any

import torch
from labelled_images import add_flags, load_problem
from torch import Tensor
from tqdm import tqdm

from tokensieve import files, provenance
from tokensieve.measuring.flops import gflops
from tokensieve.measuring.rounds import detached_handle


def mean_and_error(values: Tensor) -> tuple[float, float]:
    return values.mean().item(), values.std().item() / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--plans", nargs="+", required=True, metavar="PLAN")
    args = parser.parse_args()
    torch.set_num_threads(1)
    problem = load_problem(args)
    handles = [detached_handle(problem.model, plan) for plan in ("none", *args.plans)]
    features: list[list[Tensor]] = [[] for _ in handles]
    seconds: list[list[float]] = [[] for _ in handles]
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for handle in handles:  # warm-up
            with handle:
                problem.encode(problem.batches[0].images)
        for turn, batch in enumerate(tqdm(problem.batches)):
            for number in [(turn + i) % len(handles) for i in range(len(handles))]:
                with handles[number] as handle, handle.call(samples=batch.samples):
                    started = time.process_time()
                    features[number].append(problem.encode(batch.images))
                    seconds[number].append(time.process_time() - started)
        costs, tokens = [], []
        for handle in handles:
            with handle:
                costs.append(gflops(lambda: problem.encode(problem.batches[0].images[:1])))
                tokens.append([(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger])
    whole = [torch.cat(part) for part in features]
    hits = [problem.right(part) for part in whole]
    far = [1 - (part * whole[0]).sum(1).double() for part in whole]
    rows: list[dict[str, Any]] = []
    for number, handle in enumerate(handles):
        lost, lost_error = mean_and_error(hits[0] - hits[number])
        distance, distance_error = mean_and_error(far[number])
        rows.append(
            {
                "plan": ("none", *args.plans)[number],
                "steps": str(handle.plan),
                "ledger": tokens[number],
                "speedup": statistics.median(a / b for a, b in zip(seconds[0], seconds[number], strict=True)),
                "gflops": costs[number],
                "acc1": hits[number].mean().item(),
                "lost": lost,
                "lost_stderr": lost_error,
                "distance": distance,
                "distance_stderr": distance_error,
            }
        )
    versus = [
        {
            "plans": [rows[a]["plan"], rows[b]["plan"]],
            "distance": mean_and_error(far[a] - far[b]),
            "hits": mean_and_error(hits[a] - hits[b]),
        }
        for a, b in itertools.combinations(range(1, len(rows)), 2)
    ]
    about = {"model": problem.name, "dataset": args.dataset, "split": args.split, "images": len(problem.targets)}
    timing = {"batch_size": args.batch_size, "threads": 1}
    files.write_json(args.output, about | timing | {"rows": rows, "versus": versus, "versions": provenance.versions()})
    for row in rows:
        print(
            f"{row['plan']:45} {row['speedup']:5.2f}x  acc1 {100 * row['acc1']:5.1f}  lost {100 * row['lost']:5.1f} ± "
            f"{100 * row['lost_stderr']:.1f}  1 - cos {row['distance']:.4f} ± {row['distance_stderr']:.4f}"
        )


if __name__ == "__main__":
    main()
