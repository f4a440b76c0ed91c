"""What makes `cover` good: seeds x what happens to the rest x norm x number of tokens, on one model and its images.

    python benchmarks/ablation.py --split val --output benchmarks/results/ablation_val.json
    python benchmarks/ablation.py --model CLIP_FOLDER --model_type hf --dataset wds/photos --dataset_root PHOTOS \\
        --load_clfs CLASSIFIER --output benchmarks/results/ablation_clip.json

All variants cut at the same place. The blocks before the cut run once for each batch. Each row has top-1 accuracy and 1 - cos,
the distance to the full model's feature, with what is lost against the full model and the standard errors over images (of
accuracy: of the paired difference). ablation_tasks.py does the same for other tasks.
"""

from __future__ import annotations

import argparse
import math
import warnings
from typing import Any

import torch
from ablation_variants import more_assignments, variants
from labelled_images import add_flags, load_problem
from remember import remember_outputs
from torch import Tensor
from tqdm import tqdm

from tokensieve import files, provenance
from tokensieve.measuring.rounds import detached_handle
from tokensieve.models.registry import open_tower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--place", type=int, help="blocks before the cut (default: half)")
    parser.add_argument("--keep", nargs="+", type=int, default=[98, 60, 32, 16, 8])
    parser.add_argument("--norms", nargs="+", type=float, default=[0.0, 1.0, 2.0])
    args = parser.parse_args()
    problem = load_problem(args)
    tower = open_tower(problem.model)
    place = args.place or tower.depth // 2
    remember_outputs([block.module for block in tower.blocks[:place]])
    compared = [make for of in (variants, more_assignments) for make in of(str(place), args.keep, args.norms)]
    features: list[list[Tensor]] = [[] for _ in range(1 + len(compared))]
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handles = [detached_handle(problem.model, plan) for plan in ("none", *(variant.plan for variant in compared))]
        for batch in tqdm(problem.batches):
            for handle, parts in zip(handles, features, strict=True):
                with handle, handle.call(samples=batch.samples):
                    parts.append(problem.encode(batch.images))
    full, *others = (torch.cat(parts) for parts in features)
    full_right, n = problem.right(full), math.sqrt(len(problem.targets))
    rows: list[dict[str, Any]] = []
    for variant, found in zip(compared, others, strict=True):
        lost, distance = full_right - problem.right(found), 1 - (found * full).sum(1).double()
        rows.append(
            {
                **variant._asdict(),
                "acc1": problem.right(found).mean().item(),
                "lost": lost.mean().item(),
                "lost_stderr": lost.std().item() / n,
                "distance": distance.mean().item(),
                "distance_stderr": distance.std().item() / n,
            }
        )
    about = {
        "model": problem.name,
        "dataset": args.dataset,
        "split": args.split,
        "images": len(problem.targets),
        "place": place,
        "acc1_full": full_right.mean().item(),
    }
    files.write_json(args.output, about | {"rows": rows, "versions": provenance.versions()})


if __name__ == "__main__":
    main()
