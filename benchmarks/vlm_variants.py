"""Writes the training configs of `vlm.sh`: the embedded configs with three seeds, a tighter budget, and ablations.

python benchmarks/vlm_variants.py FOLDER
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
SEEDS = (0, 1, 2)
TIGHTER = {"target_merge_tokens": 24, "target_prune_tokens": [12, 6, 3]}
# The settings of configs/vision_token_pruning.yaml, with its layers and counts as shares of this model's.
ORIGINAL = {
    "target_merge_tokens": 98,
    "pruning_layers": [4, 7, 11],
    "target_prune_tokens": [68, 51, 34],
    "token_choice": "top",
    "prune_rest": "drop",
    "hard_share": 0.5,
    "adv_loss_weight": 1.0,
    "disc_hidden": 128,
    "disc_reinit_prob": 0.01,
}
ADVERSARIAL = {"adv_loss_weight": 1.0, "disc_hidden": 128}
# name: (config, changes of method_settings, the learning rate of merger and heads or None for the config's, steps, seeds)
VARIANTS: dict[str, tuple[str, dict[str, Any], float | None, int, tuple[int, ...]]] = {
    "shipped": ("embedded_vlm", {}, None, 240, SEEDS),
    "tight": ("embedded_vlm_tight", {}, None, 240, SEEDS),
    "tighter": ("embedded_vlm_tight", TIGHTER, 3e-3, 150, SEEDS),
    "tighter_hard": ("embedded_vlm_tight", TIGHTER | {"hard_share": 1.0}, 3e-3, 150, (0,)),
    "tighter_adversarial": ("embedded_vlm_tight", TIGHTER | ADVERSARIAL, 3e-3, 150, (0,)),
    "original": ("embedded_vlm", ORIGINAL, 2e-5, 240, (0,)),
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (config, changes, rate, steps, seeds) in VARIANTS.items():
        base = yaml.safe_load((ROOT / "configs" / f"{config}.yaml").read_text(encoding="utf-8"))
        for seed in seeds:
            variant = copy.deepcopy(base)
            variant["output"] = str(folder / f"{name}-{seed}")
            variant["backbone_settings"]["tower_cache"] = str(folder / "tower_cache")
            variant["method_settings"] |= changes
            if "target_merge_tokens" in changes:
                variant["method_settings"].pop("merge_ratio", None)
            optimization = variant["trainer_settings"]["dl_settings"]
            optimization |= {"seed": seed, "max_steps": steps, "checkpoint_every": steps, "evaluate_every": steps}
            for group in ("token_merger", "layer_pruners") if rate else ():
                optimization["optimizers"][group]["lr"] = rate
            (folder / f"{name}-{seed}.yaml").write_text(yaml.safe_dump(variant, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
