"""Writes the training configs of the ablation: variants of configs/embedded_vlm.yaml.

python benchmarks/vlm_variants.py FOLDER
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
VARIANTS: dict[str, dict[str, Any]] = {
    "question_aware": {"merger_type": "question_aware"},
    "simple": {"merger_type": "simple"},
    "no_merger": {"merger_type": "none"},
    "no_pruners": {"pruning_layers": [], "target_prune_tokens": []},
    "no_discriminator": {"adv_loss_weight": 0},
}


def main(folder: Path) -> None:
    base = yaml.safe_load((ROOT / "configs" / "embedded_vlm.yaml").read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    for name, changes in VARIANTS.items():
        variant = copy.deepcopy(base)
        variant["output"] = str(folder / name)
        variant["method_settings"] |= changes
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(variant, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
