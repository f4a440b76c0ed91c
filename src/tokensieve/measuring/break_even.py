"""The break-even point of a plan: from which batch size, and from which number of vision tokens on it is faster.

The batch size is read off the rows that were measured. The number of tokens is searched on models of the same shape with random
weights and images of growing size; the plan keeps the same shares of tokens, and its trained parts stay unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tokensieve.cutting.handle import Handle
from tokensieve.errors import Uncuttable
from tokensieve.measuring import encoding
from tokensieve.measuring.generation import BATCHES, image_tokens, measure_all, prompts
from tokensieve.measuring.phases import open_model
from tokensieve.measuring.rounds import detached_handle
from tokensieve.measuring.shares import in_shares
from tokensieve.models.registry import open_tower
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan

SIDES = (4, 7, 10, 14, 20, 24)  # patches per side of the images of a vision-language model
TOWER_SIDES = (2, 4, 7, 10, 14)


def pays_from(rows: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """For each plan the batch size from which on it is faster than the full model, of those measured; None: there is none."""
    plans = dict.fromkeys(row["plan"] for row in rows)
    return {plan: _crossing([row for row in rows if row["plan"] == plan], "batch_size") for plan in plans}


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

    sides: patches per side of the images. One model of the same shape at a time is in memory beside the model.
    """
    vlm = open_model(model)
    if vlm.family != "LLaVA":
        raise Uncuttable(f"the break-even point is measured on LLaVA only; {vlm.family} chooses the size of its images")
    handle = plan if isinstance(plan, Handle) else detached_handle(model, plan, weights)
    shares = in_shares(handle, vlm.tower, vlm.decoder.depth, image_tokens(vlm))

    def rows_of(side: int) -> list[dict[str, Any]]:
        twin = _twin(model, side)
        ours = [detached_handle(twin, shares, handle.parts or None)]
        inputs = [prompts(twin, batch_size, text_tokens) for batch_size in batch_sizes]
        return [row for each in inputs for row in measure_all(twin, each, ours, repeats, 1, what=(), quiet=quiet)]

    return _search(shares, rows_of, batch_sizes, sides or SIDES, "first")


def tower_break_even(
    model: nn.Module,
    build: Callable[[int], nn.Module],
    plan: Plan,
    batch_sizes: Sequence[int],
    sides: Sequence[int] | None = None,
    repeats: int = 3,
    *,
    weights: Weights = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """The number of vision tokens from which on the plan encodes images faster. build: the model for images of a size."""
    tower = open_tower(model)
    patch, n = tower.image_size[0] // tower.grid[0], tower.grid[0] * tower.grid[1]
    shares = in_shares(detached_handle(model, plan, weights), tower, None, n)

    def rows_of(side: int) -> list[dict[str, Any]]:
        twin = build(side * patch)
        inputs = [encoding.noise_images(twin, batch_size) for batch_size in batch_sizes]
        return [row for each in inputs for row in encoding.measure(twin, each, [shares], repeats, quiet, weights)]

    return _search(shares, rows_of, batch_sizes, sides or TOWER_SIDES, "encode")


def _search(
    shares: Plan,
    rows_of: Callable[[int], list[dict[str, Any]]],
    batch_sizes: Sequence[int],
    sides: Sequence[int],
    phase: str,
) -> dict[str, Any]:
    rows = []
    for row in (row for side in sides for row in rows_of(side)):
        about = {name: row[name] for name in ("batch_size", "vision_tokens")}
        rows.append(about | {"speedup": _speedup(row), "seconds_full": _first(row["seconds_full"])})
    by_size = {size: [row for row in rows if row["batch_size"] == size] for size in batch_sizes}
    return {
        "plan": str(shares),
        "weights": "random, of the same shape",
        "speedup_of": phase,
        "vision_tokens": {str(size): _crossing(found, "vision_tokens") for size, found in by_size.items()},
        "rows": rows,
    }


def _first(value: Any) -> Any:
    """Of a vision-language model: up to the first new token."""
    return value["first"] if isinstance(value, Mapping) else value


def _speedup(row: Mapping[str, Any]) -> float:
    return float(_first(row["speedup"]))


def _crossing(rows: Sequence[Mapping[str, Any]], name: str) -> int | None:
    """The smallest of the values of this name from which on the plan is always faster; None: there is none."""
    crossing = None
    for row in sorted(rows, key=lambda row: row[name]):
        if _speedup(row) <= 1:
            crossing = None
        elif crossing is None:
            crossing = row[name]
    return crossing


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
