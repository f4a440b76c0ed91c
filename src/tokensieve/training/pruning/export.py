"""The files of a finished training of two-stage VLM pruning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokensieve import files
from tokensieve.parts import files as part_files
from tokensieve.training import checkpoint, start
from tokensieve.training.log import loss_curve
from tokensieve.training.pruning.learner import PruningLearner


def export(learner: PruningLearner, run: Path) -> dict[str, Any]:
    """Write the parts of the best evaluation, its numbers as result.json, and the card, which is returned."""
    config = learner.config
    best = checkpoint.load(run / start.CHECKPOINTS / checkpoint.BEST)
    learner.load_weights(best.state["learner"])
    done = {"step": best.step, "steps": learner.steps, "training_seconds": round(learner.seconds)}
    evaluation = best.state["progress"]["evaluation"] | learner.evaluator.times()
    files.write_json(run / "result.json", evaluation | done)
    trained = {
        "model": learner.loaded.name,
        "model_fingerprint": learner.loaded.fingerprint,
        "dataset": config.dataset_settings.name,
        "plans": [str(learner.plan)],
        "steps": best.step,
        "seed": learner.optim.seed,
    }
    for name, part in learner.parts.items():
        part_files.save_part(run / f"{name}.safetensors", name, part, learner.model, trained)
    card = {
        "methods": list(learner.parts),
        "plan": str(learner.plan),
        "trained": trained,
        "objective": "adversarial at the words' hidden states, cross-entropy of the answers, counts of tokens",
        "recipe": config.recipe(),
        "questions": learner.steps * learner.samples_per_step,
        "seconds": round(learner.seconds),
        "parameters": {name: sum(p.numel() for p in part.parameters()) for name, part in learner.groups.items()},
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "accuracy": {"val": evaluation},
        "loss_curve": loss_curve(run),
    }
    files.write_json(run / "card.json", card)
    return card
