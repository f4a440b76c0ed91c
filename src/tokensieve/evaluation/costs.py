"""What each plan did to the tokens, and what it cost: FLOPs and speed, beside the full model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tokensieve.cutting.passes import Row
from tokensieve.data.source import Inputs
from tokensieve.evaluation.planned_model import Fusion, PlannedModel
from tokensieve.evaluation.token_fusion import ANCHOR_RULE
from tokensieve.measuring.decoder_tokens import decoder_tokens
from tokensieve.measuring.flops import gflops_within


def summarise_reductions(
    models: Sequence[PlannedModel],
    full: PlannedModel,
    sample: Inputs,
    tokens: int | None,
    language_model: nn.Module | None = None,
) -> list[dict[str, Any]]:
    """What every plan did and what it cost, with the full model beside it.

    tokens: of an image before any cut. language_model: its FLOPs are counted separately, and times are of questions.
    """
    with torch.inference_mode():
        for model in models:
            if model.handle is not None and not model.handle.ledger:  # its features come from an earlier run
                model.run_for_flops(sample)
        ledgers = [model.handle.ledger if model.handle else [] for model in models]  # read before counting runs it again
        cost_full = _cost(full, sample, language_model)
        made = []
        for model, ledger in zip(models, ledgers, strict=True):
            patches = ledger[0].tokens_in if ledger else tokens
            cost = _cost(model, sample, language_model) if model.handle or model.fusion.kind != "cls" else cost_full
            made.append(
                {
                    "plan": str(model.plan),
                    "applied": model.handle is not None,
                    "changed": model.unchanged_reason is None,
                    "reason": model.reason or model.unchanged_reason,
                    "layers": [vars(row) for row in ledger],
                    "tokens_in": patches,
                    "tokens_out": ledger[-1].tokens_out if ledger else patches,
                    **_decoder_budget(ledger, patches, language_model),
                    **({"trained": model.trained} if model.trained else {}),
                    "token_fusion": model.fusion.kind,
                    **_fusion_settings(model.fusion),
                    **cost,
                    **{f"{name}_full": value for name, value in cost_full.items()},
                    "images_per_second": model.images_per_second(),
                    "images_per_second_full": full.images_per_second(),
                    **_speed_up(model, full),
                    **(_seconds(model, full) if language_model is not None else {}),
                    "notes": model.notes,
                }
            )
    return made


def _decoder_budget(ledger: Sequence[Row], tokens: int | None, language_model: nn.Module | None) -> dict[str, float]:
    """The vision tokens of an image that enter the language model, and their mean over its layers; papers report either."""
    layers: Any = getattr(language_model, "layers", ())
    if tokens is None or not len(layers):
        return {}
    counts = decoder_tokens(ledger, tokens, len(layers))
    return {"tokens_entrance": counts[0], "tokens_layer_average": sum(counts) / len(counts)}


def _fusion_settings(fusion: Fusion) -> dict[str, Any]:
    """What the weights of patches depend on."""
    if fusion.kind != "weighted":
        return {}
    return {
        "token_fusion_weight": fusion.weight,
        "token_fusion_temperature": fusion.temperature,
        "token_fusion_anchors": ANCHOR_RULE,
    }


def _cost(model: PlannedModel, sample: Inputs, language_model: nn.Module | None) -> dict[str, float]:
    """GFLOPs of one sample, all in all and of the language model."""
    total, inside = gflops_within(partial(model.run_for_flops, sample), model.model, language_model)
    return {"gflops": total} if language_model is None else {"gflops": total, "gflops_llm": inside}


def _speed_up(model: PlannedModel, full: PlannedModel) -> dict[str, float | int]:
    """How much faster than the full model: the median over batches, the quartiles around it, and how many batches it is of."""
    found = None if model is full else model.speed_up(full)
    return {} if found is None else {**found[0].entries("speedup"), "speedup_batches": found[1]}


def _seconds(model: PlannedModel, full: PlannedModel) -> dict[str, float | None]:
    """Seconds from a question (and its image) to the end of its answer, in batches as they were run."""
    speeds = {"seconds_per_question": model.images_per_second(), "seconds_per_question_full": full.images_per_second()}
    return {name: None if speed is None else 1 / speed for name, speed in speeds.items()}
