"""TODO docstring."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tokensieve.cutting.handle import Handle
from tokensieve.errors import Uncuttable
from tokensieve.measuring.generation import BATCHES, in_shares, measure, prompts
from tokensieve.measuring.phases import SIDES, fresh_handle, open_model
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan


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
    """From how many vision tokens on the plan reads a prompt faster than the full model does.

    Found by measuring, on models of the same shape with random weights whose images grow (sides: patches a side); one of them
    at a time is in memory beside the model itself. The plan keeps the shares of tokens that it keeps on the model itself, and
    its trained parts stay as they are.
    """
    vlm = open_model(model)
    if vlm.family != "LLaVA":
        raise Uncuttable(f"the break-even point is measured on LLaVA alone; {vlm.family} sizes its images by itself")
    handle = plan if isinstance(plan, Handle) else fresh_handle(model, plan, weights)
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
    with torch.random.fork_rng(devices=[]):  # the caller's draws stay what they would have been
        torch.manual_seed(0)
        twin: Any = type(model)._from_config(config, dtype=like.dtype, attn_implementation=implementation)
    return twin.to(like.device).eval()


def _crossing(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The smallest number of vision tokens from which on the plan is faster at every number measured; None: it never is."""
    found = None
    for row in sorted(rows, key=lambda row: row["vision_tokens"]):
        if row["speedup"] <= 1:
            found = None
        elif found is None:
            found = row["vision_tokens"]
    return found


def print_points(points: Sequence[Mapping[str, Any]]) -> None:
    for point in points:
        print(f"Break-even of {point['plan']} (first token; models of this shape with random weights):")
        for size, n in point["vision_tokens"].items():
            measured = ", ".join(
                f"{row['vision_tokens']}: {row['speedup']:.2f}x" for row in point["rows"] if str(row["batch_size"]) == size
            )
            told = "not faster at any number of vision tokens" if n is None else f"faster from {n} vision tokens on"
            print(f"  batch {size}: {told} ({measured})")
