"""The trained methods beside controls: `learned`, DynamicViT, PatchMerger, SiT and Sinkhorn, trained and not, at the same cut.

    python benchmarks/trained_zoo.py --weights outputs --split val --limit 400 --output benchmarks/results/trained_zoo_val.json

--weights: a folder with NAME.safetensors for each method, or NAME/NAME.safetensors as the trainings leave them. An untrained
part is the one that the training starts from. Rows have top-1 accuracy, what is lost against the full model with the standard
error of the paired difference, and the same against `learned` with rest=merge.
"""

from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from labelled_images import add_flags, load_problem
from remember import remember_outputs
from torch import Tensor

from tokensieve import files, provenance
from tokensieve.cutting.handle import Handle
from tokensieve.measuring.rounds import detached_handle
from tokensieve.methods.registry import get_method
from tokensieve.models.registry import open_tower
from tokensieve.plan import Plan
from tokensieve.training.learned_selector.learner import build_part

PLACE, KEEP = 4, 32
TRAINED = ("dynamicvit", "patchmerger", "sit", "sinkhorn")
CONTROLS = ("learned", "anchor", "cover", "topk", "grid", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--weights", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    problem = load_problem(args)
    tower = open_tower(problem.model)
    handles: dict[tuple[str, bool], Handle] = {("none", False): detached_handle(problem.model, "none")}
    for name in CONTROLS:
        rests = ("",) if get_method(name).norm is not None else ("", "(rest=merge)")
        for rest in rests:
            plan = f"{name}@{PLACE}:{KEEP}{rest}"
            handles[plan, name == "learned"] = detached_handle(problem.model, plan)
    for name in TRAINED:
        found = [
            path
            for path in (args.weights / f"{name}.safetensors", args.weights / name / f"{name}.safetensors")
            if path.exists()
        ]
        method = get_method(name)
        for rest in ("", "(rest=merge)") if method.selects else ("",):
            plan = f"{name}@{PLACE}:{KEEP}{rest}"
            torch.manual_seed(0)
            part = build_part(method, tower, [Plan.parse(plan)]).eval()
            handles[plan, False] = detached_handle(problem.model, plan, {name: part})
            if found:
                handles[plan, True] = detached_handle(problem.model, plan, found[0])
    remember_outputs([block.module for block in tower.blocks[:PLACE]])
    features: dict[tuple[str, bool], list[Tensor]] = {key: [] for key in handles}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in problem.batches:
            assert batch.images is not None
            for key, handle in handles.items():
                with handle, handle.call(samples=batch.samples):
                    features[key].append(problem.encode(batch.images))
    right = {key: problem.right(torch.cat(parts)) for key, parts in features.items()}
    full, root = right["none", False], math.sqrt(len(problem.targets))
    best = right[f"learned@{PLACE}:{KEEP}(rest=merge)", True]
    rows: list[dict[str, Any]] = []
    for (plan, trained), ours in right.items():
        lost, behind = full - ours, best - ours
        rows.append(
            {
                "plan": plan,
                "trained": trained,
                "acc1": ours.mean().item(),
                "lost": lost.mean().item(),
                "lost_stderr": lost.std().item() / root,
                "behind_learned": behind.mean().item(),
                "behind_learned_stderr": behind.std().item() / root,
            }
        )
        print(f"{plan}{' (trained)' if trained else ''}: {ours.mean():.3f}", flush=True)
    about = {"model": problem.name, "dataset": args.dataset, "split": args.split, "images": len(problem.targets)}
    files.write_json(args.output, about | {"rows": rows, "versions": provenance.versions()})


if __name__ == "__main__":
    main()
