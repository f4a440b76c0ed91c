"""Peak memory of reading a prompt over the number of vision tokens, with plans and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tokensieve.measuring.generation import prompts
from tokensieve.measuring.phases import open_model, read_prompt
from tokensieve.measuring.rounds import detached_handle
from tokensieve.measuring.suite_models import TEXT_TOKENS, llava

SIDES = (24, 54, 126)  # patches per side: 576, 2,916 and 15,876 vision tokens
TINY_SIDES = (9, 12)
PLANS = ("cover@out:64", "grid@llm.2:64(rest=merge)", "anchor@llm.2:64(rest=merge)")


def measure_growth(sides: Sequence[int], device: torch.device) -> list[dict[str, Any]]:
    """For each number of vision tokens and each plan: peak memory without the plan and with it, in MiB.

    The model is a LLaVA with few narrow layers, so that long prompts are quick to read.
    """
    rows = []
    for side in sides:
        torch.manual_seed(0)
        model = llava(side, layers=4, width=128, tower_layers=2, tower_width=64).to(device).eval()
        vlm, inputs = open_model(model), prompts(model, 1, TEXT_TOKENS)
        full = read_prompt(vlm, None, model, inputs)[1]
        for plan in PLANS:
            peak = read_prompt(vlm, detached_handle(model, plan), model, inputs)[1]
            rows.append({"plan": plan, "vision_tokens": side**2, "peak_mib_full": full, "peak_mib": peak})
    return rows
