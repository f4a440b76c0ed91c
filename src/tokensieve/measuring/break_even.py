"""The break-even point of a plan: the number of vision tokens from which on it reads a prompt faster than the full model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tokensieve.cutting.handle import Handle
from tokensieve.errors import Uncuttable
from tokensieve.measuring.generation import BATCHES, in_shares, measure, prompts
from tokensieve.measuring.phases import open_model
from tokensieve.measuring.rounds import detached_handle
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan

SIDES = (4, 7, 10, 14, 20, 24)  # patches per side


def break_even(
    model: nn.Module,
    plan: Plan | str | Handle,
    batch_sizes: Sequence[int] = BATCHES,
    sides: Sequence[int] | None = None,
    repeats: int = 3,
    text_tokens: int = 16,
    *,
    weights: Weights = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """The number of vision tokens from which on the plan reads a prompt faster than the full model.

    Measured on models of the same shape with random weights and images of growing size (sides: patches per side). One of
    them at a time is in memory beside the model. The plan keeps the same shares of tokens as on the model, and its trained
    parts stay unchanged.
    """
    vlm = open_model(model)
    if vlm.family != "LLaVA":
        raise Uncuttable(f"the break-even point is measured on LLaVA only; {vlm.family} chooses the size of its images")
    handle = plan if isinstance(plan, Handle) else detached_handle(model, plan, weights)
    shares = in_shares(vlm, handle)
    rows = []
    for side in sides or SIDES:
        twin = _twin(model, side)
        for batch_size in batch_sizes:
            inputs = prompts(twin, batch_size, text_tokens)
            row = measure(twin, inputs, shares, repeats, 1, weights=handle.parts or None, quiet=quiet)
            kept = {name: row[name] for name in ("batch_size", "vision_tokens", "prompt_tokens")}
            rows.append(kept | {"speedup": row["speedup"]["first"], "seconds_full": row["seconds_full"]["first"]})
    return {
        "plan": str(shares),
        "weights": "random, of the same shape",
        "speedup_of": "first",
        "vision_tokens": {str(size): _crossing([row for row in rows if row["batch_size"] == size]) for size in batch_sizes},
        "rows": rows,
    }


def _twin(model: Any, side: int) -> Any:
    """A model of the same shape with random weights, for images of side x side patches."""
    config = copy.deepcopy(model.config)
    vision, text = config.vision_config, config.text_config
    vision.image_size = side * vision.patch_size
    config.image_seq_length = side**2
    text.max_position_embeddings = max(text.max_position_embeddings, 2 * side**2)
    like = next(model.parameters())
    implementation = model.config._attn_implementation
    with torch.random.fork_rng(devices=[]):  # leaves the state of the caller's generator
        torch.manual_seed(0)
        twin: Any = type(model)._from_config(config, dtype=like.dtype, attn_implementation=implementation)
    return twin.to(like.device).eval()


def _crossing(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The smallest number of vision tokens from which on the plan is always faster, of those measured; None: there is none."""
    crossing = None
    for row in sorted(rows, key=lambda row: row["vision_tokens"]):
        if row["speedup"] <= 1:
            crossing = None
        elif crossing is None:
            crossing = row["vision_tokens"]
    return crossing
