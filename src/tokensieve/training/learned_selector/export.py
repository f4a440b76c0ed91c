"""What a trained part reaches on the validation split, and the files that hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tokensieve import files
from tokensieve.config import recipe
from tokensieve.data.source import Broken
from tokensieve.errors import UserError, short
from tokensieve.models.features import encode_image
from tokensieve.parts.files import describe_part, pack_part
from tokensieve.parts.signature import model_signature
from tokensieve.tasks.statistics import share_stderr
from tokensieve.training.learned_selector.learner import SelectorLearner
from tokensieve.training.log import loss_curve


@torch.no_grad()
def measure(learner: SelectorLearner) -> dict[str, dict[str, float]]:
    """On the validation split, of the full model and every plan: the cosine to the full model's feature, and acc1."""
    learner.scorer.eval()
    source = learner.read(learner.config.val_split, learner.config.val_images)
    runs = {"none": None} | {str(plan): handle for plan, handle in zip(learner.plans, learner.handles, strict=True)}
    cosines, correct, n, broken = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0), 0, list[Broken]()
    for batch in source.loader(64, learner.config.workers):
        broken += batch.broken
        if batch.images is None:
            continue
        images = batch.images.to(learner.device)
        target = F.normalize(encode_image(learner.model, images), dim=-1)
        for name, handle in runs.items():
            feature = target
            if handle is not None:
                with handle, handle.call(samples=batch.samples):
                    feature = F.normalize(encode_image(learner.model, images), dim=-1)
            cosines[name] += float((feature * target).sum())
            if learner.classifier is not None:
                best = (feature @ learner.classifier).argmax(-1).cpu()  # (B,)
                correct[name] += int((best == torch.as_tensor(batch.targets)).sum())
        n += len(images)
    if n == 0 or len(broken) > learner.config.allowed(n + len(broken)):
        example = f", such as {short(broken[0].name, 200)}: {broken[0].reason}" if broken else ""
        raise UserError(
            f"{len(broken)} of {n + len(broken)} validation images of {learner.config.dataset} cannot be read{example}; "
            f"max_broken: {learner.config.max_broken:g}"
        )
    measured = {}
    for name in runs:
        measured[name] = {"cosine": round(cosines[name] / n, 4), "n": n} | ({"unreadable": len(broken)} if broken else {})
        if learner.classifier is not None:
            acc1 = correct[name] / n
            measured[name] |= {"acc1": round(acc1, 4), "stderr": round(share_stderr(acc1, n), 4)}
    return measured


def part_files(learner: SelectorLearner, step: int) -> dict[str, bytes]:
    """The file of the part as it is after a step."""
    header = describe_part(learner.method.name, learner.scorer, model_signature(learner.model), _trained(learner, step))
    return {f"{learner.method.name}.safetensors": pack_part(learner.scorer, header)}


def _trained(learner: SelectorLearner, step: int) -> dict[str, Any]:
    config = learner.config
    return {
        "model": f"{config.model} {config.pretrained}",
        "model_fingerprint": learner.loaded.fingerprint,
        "dataset": f"{config.dataset} {config.split}",
        "plans": [str(plan) for plan in learner.plans],
        "steps": step,
        "seed": config.seed,
    }


def export(learner: SelectorLearner, run: Path) -> dict[str, Any]:
    """Write the weights, the card, and the loss curve as a table. Returns the card."""
    config = learner.config
    for name, content in part_files(learner, config.steps).items():
        files.write_bytes(run / name, content)
    card = {
        "method": learner.method.name,
        "trained": _trained(learner, config.steps),
        "objective": "the full model's feature (1 - cosine), classes (KL)"
        + (", next attention (KL)" if any(learner.next_blocks) else "")
        + ("; straight-through" if learner.method.selects else ""),
        "recipe": recipe.recipe(config),
        "pictures": config.steps * config.batch,
        "unreadable": list(learner.broken),
        "seconds": round(learner.seconds),
        "parameters": sum(p.numel() for p in learner.scorer.parameters()),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "accuracy": {f"{config.val_split} {name}": numbers for name, numbers in measure(learner).items()}
        if config.evaluate
        else {},
        "loss_curve": loss_curve(run),
    }
    files.write_json(run / "card.json", card)
    return card
