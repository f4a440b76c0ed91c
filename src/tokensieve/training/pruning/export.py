"""The files of a finished training of two-stage VLM pruning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokensieve import files
from tokensieve.parts.checkpoints import BEST, CHECKPOINTS
from tokensieve.parts.files import describe_part, pack_part
from tokensieve.parts.signature import model_signature
from tokensieve.training import checkpoint
from tokensieve.training.log import loss_curve
from tokensieve.training.pruning.learner import PruningLearner


def part_files(learner: PruningLearner, step: int) -> dict[str, bytes]:
    """The files of merger and heads as they are after a step."""
    origin, trained = model_signature(learner.model), _trained(learner, step)
    return {
        f"{name}.safetensors": pack_part(part, describe_part(name, part, origin, trained))
        for name, part in learner.parts.items()
    }


def _trained(learner: PruningLearner, step: int) -> dict[str, Any]:
    return {
        "model": learner.loaded.name,
        "model_fingerprint": learner.loaded.fingerprint,
        "dataset": learner.config.dataset_settings.name,
        "plans": [str(learner.plan)],
        "steps": step,
        "seed": learner.optim.seed,
    }


def export(learner: PruningLearner, run: Path) -> dict[str, Any]:
    """Write the parts of the best evaluation, its numbers as result.json, and the card, which is returned."""
    config = learner.config
    best = checkpoint.load(run / CHECKPOINTS / BEST)
    learner.load_weights(best.state["learner"])
    done = {"step": best.step, "steps": learner.steps, "training_seconds": round(learner.seconds)}
    evaluation = best.state["progress"]["evaluation"] | learner.evaluator.times()
    files.write_json(run / "result.json", evaluation | done)
    for name, content in part_files(learner, best.step).items():
        files.write_bytes(run / name, content)
    card = {
        "methods": list(learner.parts),
        "plan": str(learner.plan),
        "trained": _trained(learner, best.step),
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
