"""TODO docstring."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tokensieve.data.source import Inputs
from tokensieve.evaluation.planned_model import PlannedModel
from tokensieve.measuring.flops import gflops_within


def summarise_reductions(
    arms: Sequence[PlannedModel],
    full: PlannedModel,
    sample: Inputs,
    tokens: int | None,
    language_model: nn.Module | None = None,
) -> list[dict[str, Any]]:
    """What every plan did and what it cost, with the unreduced model beside it.

    tokens: those of an image before any cut. language_model: its operations are told apart, and times are of questions.
    """
    with torch.inference_mode():
        for arm in arms:
            if arm.handle is not None and not arm.handle.ledger:  # its features were there already
                arm.run_once(sample)
        ledgers = [arm.handle.ledger if arm.handle else [] for arm in arms]  # read before counting runs again
        cost_full = _cost(full, sample, language_model)
        made = []
        for arm, ledger in zip(arms, ledgers, strict=True):
            patches = ledger[0].tokens_in if ledger else tokens
            cost = _cost(arm, sample, language_model) if arm.handle or arm.fusion.kind != "cls" else cost_full
            made.append(
                {
                    "plan": str(arm.plan),
                    "applied": arm.handle is not None,
                    "reason": arm.reason,
                    "layers": [vars(row) for row in ledger],
                    "tokens_in": patches,
                    "tokens_out": ledger[-1].tokens_out if ledger else patches,
                    **({"trained": arm.trained} if arm.trained else {}),
                    "token_fusion": arm.fusion.kind,
                    **({"token_fusion_weight": arm.fusion.weight} if arm.fusion.kind == "weighted" else {}),
                    **cost,
                    **{f"{name}_full": value for name, value in cost_full.items()},
                    "images_per_second": arm.images_per_second(),
                    "images_per_second_full": full.images_per_second(),
                    **(_seconds(arm, full) if language_model is not None else {}),
                    "notes": arm.notes,
                }
            )
    return made


def _cost(arm: PlannedModel, sample: Inputs, language_model: nn.Module | None) -> dict[str, float]:
    """GFLOPs of one sample, all in all and of the language model."""
    total, inside = gflops_within(partial(arm.run_once, sample), arm.model, language_model)
    return {"gflops": total} if language_model is None else {"gflops": total, "gflops_llm": inside}


def _seconds(arm: PlannedModel, full: PlannedModel) -> dict[str, float | None]:
    """Seconds from a question (and its image) to the end of its answer, in batches as they were run."""
    speeds = {"seconds_per_question": arm.images_per_second(), "seconds_per_question_full": full.images_per_second()}
    return {name: None if speed is None else 1 / speed for name, speed in speeds.items()}
