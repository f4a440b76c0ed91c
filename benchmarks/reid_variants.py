"""Writes the training configs compared in docs/results.md: configs/embedded_reid.yml with other plans and seeds.

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
}


def main(folder: Path) -> None:
    base = yaml.safe_load((ROOT / "configs" / "embedded_reid.yml").read_text(encoding="utf-8"))
    del base["MODEL"]["USE_SDTPS"]
    folder.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        for name, changes in VARIANTS.items():
            variant = copy.deepcopy(base)
            variant["OUTPUT_DIR"] = str(folder / f"{name}-{seed}")
            variant["MODEL"] |= changes
            variant["SOLVER"]["SEED"] = seed
            (folder / f"{name}-{seed}.yml").write_text(yaml.safe_dump(variant, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
