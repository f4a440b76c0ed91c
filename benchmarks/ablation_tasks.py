"""The variants of ablation.py on any task of `tokensieve eval`: what each loses against the full model, sample by sample.

    python benchmarks/ablation_tasks.py --place 4 --dataset embedded-heldout --metric acc1 --output FILE.json

Other arguments are those of `tokensieve eval`, without plans. Every batch runs through the vision tower's blocks before a
cut once, so times and FLOPs mean nothing here and are left out. Each row has the main metric and what is lost of it, with
standard errors (of the loss: of the paired difference).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from ablation_variants import Variant, variants
from remember import remember_outputs

from tokensieve import files, provenance
from tokensieve.cli import main as tokensieve
from tokensieve.evaluation import run
from tokensieve.models.loading.loaded import Loaded
from tokensieve.models.registry import open_tower
from tokensieve.plan import Plan


class RememberingModels(run.ModelCache):
    """Models whose blocks remember their last output."""

    def get(self, model: str, pretrained: str) -> Loaded:
        is_new = self.loaded is None
        loaded = super().get(model, pretrained)
        if is_new:
            remember_outputs([block.module for block in open_tower(loaded.model).blocks])
        return loaded


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--metric", required=True, help="the task's main metric")
    parser.add_argument("--place", nargs="+", required=True)
    parser.add_argument("--keep", nargs="+", type=int, default=[60, 16])
    parser.add_argument("--norms", nargs="+", type=float, default=[0.0, 1.0, 2.0])
    args, of_eval = parser.parse_known_args()
    compared = [variant for place in args.place for variant in variants(place, args.keep, args.norms)]
    run.ModelCache = RememberingModels  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        plans = ["--plan", "none", "--compare", *(variant.plan for variant in compared)]
        code = tokensieve(["eval", *of_eval, *plans, "--strict", "--output", f"{folder}/"])
        if code:
            sys.exit(code)
        found = {
            row["reduction"]["plan"]: row for row in (json.loads(path.read_text()) for path in Path(folder).glob("*.json"))
        }
    full = found["none"]
    rows = [summary(variant, found[str(Plan.parse(variant.plan))], args.metric) for variant in compared]
    about = {name: full[name] for name in ("model", "dataset", "task")} | {
        name: full["run"][name] for name in ("split", "n_samples")
    }
    score = {
        "metric": args.metric,
        "full": full["metrics"][args.metric],
        "full_stderr": full["metrics"][f"{args.metric}_stderr"],
    }
    files.write_json(args.output, about | score | {"rows": rows, "versions": provenance.versions()})


def summary(variant: Variant, row: dict[str, Any], metric: str) -> dict[str, Any]:
    lost = {name: row["reduction"][name] for name in ("lost", "lost_stderr")}
    return variant._asdict() | {"score": row["metrics"][metric]} | lost


if __name__ == "__main__":
    main()
