"""The files of a finished training of re-identification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokensieve import files
from tokensieve.parts import files as part_files
from tokensieve.parts.checkpoints import BEST, CHECKPOINTS
from tokensieve.reid import loading
from tokensieve.reid.training import ReidLearner
from tokensieve.training import checkpoint
from tokensieve.training.log import loss_curve


def export(learner: ReidLearner, run: Path) -> dict[str, Any]:
    """Write the model of the best evaluation (without one, the last), its numbers as result.json, and the card."""
    config, step = learner.config, learner.steps
    best = run / CHECKPOINTS / BEST
    evaluation: dict[str, Any] = {}
    if best.exists():
        loaded = checkpoint.load(best)
        learner.model.load_state_dict(loaded.state["learner"]["model"])
        evaluation, step = loaded.state["progress"]["evaluation"], loaded.step
    done = {"step": step, "steps": learner.steps, "training_seconds": round(learner.seconds)}
    files.write_json(run / "result.json", evaluation | done)
    loading.save(learner.model, run)
    trained = {"model": config.MODEL.TRANSFORMER_TYPE, "plan": config.MODEL.plan, "data": config.DATASETS.NAMES}
    for name, part in learner.model.parts.items():
        part_files.save_part(run / f"{name}.safetensors", name, part, learner.model, trained)
    card = {
        **trained,
        "objective": f"of each branch {' and '.join(learner.objectives)}",
        "recipe": learner.recipe,
        "seed": learner.solver.SEED,
        "objects": learner.steps * learner.solver.IMS_PER_BATCH,
        "seconds": round(learner.seconds),
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "accuracy": {"val": {name: round(value, 4) for name, value in evaluation.items()} | done} if evaluation else {},
        "loss_curve": loss_curve(run),
    }
    files.write_json(run / "card.json", card)
    return card
