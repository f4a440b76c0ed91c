"""Writes the training configs compared in docs/results.md: configs/embedded_reid.yml with other plans and seeds.

FOLDER gets those that start from the pretrained backbone; FOLDER/merge those of configs/embedded_reid_merge.yml, which start
from FOLDER/baseline-SEED, the uncut model of the same seed, and have it as their teacher.

python benchmarks/reid_variants.py FOLDER
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
SEEDS = (1, 2, 3)
VARIANTS: dict[str, dict[str, Any]] = {  # all except the first keep 26 of 128 patches
    "baseline": {"USE_SDTPS": False},
    "sdtps": {"PLAN": "sdtps@out"},
    "gumbel": {"PLAN": "sdtps@out", "SDTPS_USE_GUMBEL": True},
    "random": {"PLAN": "random@out:26"},
    "grid": {"PLAN": "grid@out:26"},
    "anchor": {"PLAN": "anchor@out:26"},
    "sdtps-half": {"PLAN": "sdtps@3"},  # inside the backbone, after half the depth
    "random-half": {"PLAN": "random@3:26"},
    "grid-half": {"PLAN": "grid@3:26"},
    "cover-half-scratch": {"PLAN": "cover@3:26"},
}
FINE_TUNED: dict[str, dict[str, Any]] = {  # merges inside the backbone: 26 tokens after block 3, 40 after block 2
    "sdtps-half-merge": {"PLAN": "sdtps@3(aggregation=merge,norm=2)"},
    "sdtps-half-norm0-merge": {"PLAN": "sdtps@3(aggregation=merge)"},
    "sdtps-third-merge": {"PLAN": "sdtps@2(aggregation=merge,norm=2)", "SDTPS_AGGR_RATIO": 0.61},
    "cover-half": {"PLAN": "cover@3:26"},
    "cover-third": {"PLAN": "cover@2:40"},
    "grid-half-merge": {"PLAN": "grid@3:26(rest=merge,norm=2)"},
    "grid-third-merge": {"PLAN": "grid@2:40(rest=merge,norm=2)"},
    "random-half-merge": {"PLAN": "random@3:26(rest=merge,norm=2)"},
    "random-third-merge": {"PLAN": "random@2:40(rest=merge,norm=2)"},
    "baseline-more": {"PLAN": "none"},  # as many more steps with all tokens
}


def main(folder: Path) -> None:
    base, merge = (
        yaml.safe_load((ROOT / "configs" / name).read_text(encoding="utf-8"))
        for name in ("embedded_reid.yml", "embedded_reid_merge.yml")
    )
    del base["MODEL"]["USE_SDTPS"]
    (folder / "merge").mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        for name, changes in VARIANTS.items():
            write(folder / f"{name}-{seed}.yml", base, changes, seed, folder / f"{name}-{seed}")
        uncut = str(folder / f"baseline-{seed}")
        for name, changes in FINE_TUNED.items():
            start = {"INIT_FROM": uncut, "TEACHER": "" if name == "baseline-more" else uncut}
            write(folder / "merge" / f"{name}-{seed}.yml", merge, changes | start, seed, folder / f"{name}-{seed}")


def write(path: Path, base: dict[str, Any], changes: dict[str, Any], seed: int, output: Path) -> None:
    """A config with other keys of MODEL, another seed and another folder."""
    variant = copy.deepcopy(base)
    variant["OUTPUT_DIR"] = str(output)
    variant["MODEL"] |= changes
    variant["SOLVER"]["SEED"] = seed
    path.write_text(yaml.safe_dump(variant, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
