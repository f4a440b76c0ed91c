"""Where the time of a vision-language model goes, under a plan and without one: tower, selection, prefill, decode.

Full model and plan answer the same prompts in one interleaved run, in an order that rotates from round to round; ratios are
medians over the rounds of ratios within a round. What each phase is:

    tower       vision tower and projector, without the selection inside; a block that is opened because the plan wants its
                attention runs in other kernels, and that is in it
    selection   all else that the plan adds until the prompt is read: scores, merges, pruner heads, masks, gathers, and putting
                the features back to their places. Of the full model: what the stopwatch itself takes at those points
    prefill     the language model over the prompt, without the selection inside
    prefill_with_selection   both; the saving is in the first, its price in the second
    decode      the language model for one new token (what the plan adds there is in it)
    other       the rest of generate(): embeddings, head, choosing tokens, bookkeeping
    first       from the start until the language model has read the prompt
    total       all of generate(), timed in a run of its own without a stopwatch inside

FLOPs are counted by the same division, by putting a counter in the place of the clock; `llm` is the language model over the
prompt with what the plan does inside it, and `all` is everything up to the first new token: gflops_llm and gflops of an eval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.cutting.handle import Handle
from tokensieve.cutting.placement import place_plan
from tokensieve.device import timed
from tokensieve.errors import UserError
from tokensieve.measuring.phases import (
    PHASES,
    Inputs,
    cache_sizes,
    count_work,
    fresh_handle,
    generate_answer,
    open_model,
    plan_on,
    split_phases,
)
from tokensieve.models.vlm import Vlm
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Budget, Plan, Where, make_step

PLAN = "anchor@out:50%"
BATCHES = (1, 16)
RATIOS = ("tower", "prefill", "prefill_with_selection", "decode", "first", "total")


def measure(
    model: nn.Module,
    inputs: Inputs,
    plan: Plan | str | Handle,
    repeats: int = 10,
    new_tokens: int = 16,
    *,
    weights: Weights = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """One row: seconds of each phase for plan and full model, ratios, GFLOPs, and the cache, for these prompts.

    inputs: what the processor gives, on the model's device. A handle may be on the model, and then is so again afterwards.
    """
    from tqdm import trange

    vlm = open_model(model)
    handle = plan if isinstance(plan, Handle) else fresh_handle(model, plan, weights)
    was_on = handle.is_attached
    handle.remove()
    device = inputs["input_ids"].device
    try:
        answer = generate_answer(model, inputs, new_tokens)
        arms = (None, handle)
        for arm in arms:  # warm-up
            with plan_on(arm):
                answer()
        rounds: list[list[dict[str, float]]] = [[], []]
        for turn in trange(repeats, desc=f"batch {len(inputs['input_ids'])}", unit="round", disable=quiet, leave=False):
            for number in (turn % 2, 1 - turn % 2):
                with plan_on(arms[number]):
                    total = timed(answer, device)[1]
                rounds[number].append({**split_phases(vlm, arms[number], answer, device), "total": total})
        full, reduced = rounds
        work = [count_work(vlm, arm, model, inputs) for arm in arms]
        caches = [cache_sizes(vlm, arm, model, inputs) for arm in arms]
    finally:
        if was_on:
            handle.attach()
    counts = inputs["input_ids"] == vlm.inner.config.image_token_id
    return {
        "plan": str(handle.plan),
        "batch_size": len(inputs["input_ids"]),
        "prompt_tokens": inputs["input_ids"].shape[1],
        "vision_tokens": int(counts.sum(1).amax()),
        "new_tokens": new_tokens,
        "layers": [vars(row) for row in handle.ledger],
        "seconds_full": _medians(full),
        "seconds": _medians(reduced),
        "speedup": {phase: _ratio([row[phase] for row in full], [row[phase] for row in reduced]) for phase in RATIOS},
        "gflops_full": work[0],
        "gflops": work[1],
        "cache_full": caches[0],
        "cache": caches[1],
        "repeats": repeats,
        "notes": handle.notes,
    }


def prompts(model: nn.Module, batch_size: int, text_tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Prompts for a LLaVA, each an image of noise between words of noise, on the model's device."""
    vlm = open_model(model)
    config, vision = vlm.inner.config, vlm.inner.config.vision_config
    if vlm.family != "LLaVA":
        raise UserError(f"prompts of noise can be made for LLaVA alone; give {vlm.family} what its processor makes")
    made = torch.Generator().manual_seed(seed)
    words = torch.randint(
        config.text_config.vocab_size // 2, config.text_config.vocab_size - 1, (batch_size, text_tokens), generator=made
    )
    words = torch.where(words == config.image_token_id, words + 1, words)
    image = torch.full((batch_size, image_tokens(vlm)), config.image_token_id)
    ids = torch.cat([words[:, :1], image, words[:, 1:]], dim=1)
    pixels = torch.randn(batch_size, 3, vision.image_size, vision.image_size, generator=made)
    where = next(model.parameters())
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels.to(where.dtype)}
    return {name: value.to(where.device) for name, value in inputs.items()}


def in_shares(vlm: Vlm, handle: Handle) -> Plan:
    """The plan with every count of tokens as the share that it is of those that arrive, on images of the model's own size.

    Its text reads as the same plan: shares are rounded down to so many digits that on this model each keeps what it kept.
    """
    n, steps = image_tokens(vlm), []
    for cut in place_plan(handle.plan, vlm.tower, 0, vlm.decoder.depth, handle.parts):
        keep = cut.budget.count(n)
        given = {name: value for name, value in cut.step.explicit_options if name != "m" or cut.step.method.budget is None}
        if cut.budget.kind == "share" or keep < n:
            share = cut.budget if cut.budget.kind == "share" else token_share(keep, n)
            steps.append(make_step(cut.step.method, Where.parse(cut.name), share, given))
        n = keep + (cut.step.rest == "fuse" and keep < n)
    return Plan(tuple(steps))


def image_tokens(vlm: Vlm) -> int:
    """Tokens that a LLaVA makes of an image: its patches, and CLS where that is shown (and the tower cannot be cut)."""
    config, vision = vlm.inner.config, vlm.inner.config.vision_config
    shows_cls = config.vision_feature_select_strategy == "full" and vlm.tower is None
    return int((vision.image_size // vision.patch_size) ** 2 + shows_cls)


def token_share(keep: int, n: int) -> Budget:
    """The share that is keep of n, in hundredths of a percent, or finer where it would be fewer tokens otherwise."""
    parts = 10_000
    while math.ceil(Fraction(keep * parts // n, parts) * n) < keep:
        parts *= 10
    return Budget("share", Fraction(keep * parts // n, parts))


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {phase: statistics.median(row[phase] for row in rounds) for phase in PHASES}


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> float | None:
    """The median of slow / fast within each round; None where there is nothing to compare (one new token: no decode)."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True)) if all(fast) else None
