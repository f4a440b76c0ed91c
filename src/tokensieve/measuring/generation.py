"""Measuring a vision-language model with and without a plan: tower, selection, prefill, decode.

Full model and plan answer the same prompts in interleaved rounds. The phases are:

    tower       vision tower and projector, without the selection inside; includes the slower kernels of blocks that are
                opened because the plan needs their attention
    selection   all other work of the plan until the prompt is read: scores, merges, pruner heads, masks, gathers, and putting
                the features back to their positions. Of the full model: the time of the stopwatch itself at those points
    prefill     the language model over the prompt, without the selection inside
    prefill_with_selection   the sum of both: the plan saves time in the first and spends it in the second
    decode      the language model for one new token, with the work of the plan
    other       the rest of generate(): embeddings, head, choosing tokens, bookkeeping
    first       from the start until the language model has read the prompt
    total       all of generate(), timed in a separate run without a stopwatch inside

FLOPs are divided into the same phases, with a FLOP counter instead of the clock. `llm` is the language model over the prompt
with the work of the plan in it, and `all` is everything up to the first new token: gflops_llm and gflops of an eval.
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
    generate_answer,
    open_model,
    plan_on,
    split_phases,
)
from tokensieve.measuring.rounds import detached_handle, median_ratio
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

    inputs: the output of the processor, on the model's device. A handle that is attached is attached again afterwards.
    """
    from tqdm import trange

    vlm = open_model(model)
    handle = plan if isinstance(plan, Handle) else detached_handle(model, plan, weights)
    was_attached = handle.is_attached
    handle.remove()
    device = inputs["input_ids"].device
    try:
        answer = generate_answer(model, inputs, new_tokens)
        variants = (None, handle)
        for variant in variants:  # warm-up
            with plan_on(variant):
                answer()
        rounds: list[list[dict[str, float]]] = [[], []]
        for turn in trange(repeats, desc=f"batch {len(inputs['input_ids'])}", unit="round", disable=quiet, leave=False):
            for number in (turn % 2, 1 - turn % 2):
                with plan_on(variants[number]):
                    total = timed(answer, device)[1]
                rounds[number].append({**split_phases(vlm, variants[number], answer, device), "total": total})
        full, reduced = rounds
        work = [count_work(vlm, variant, model, inputs) for variant in variants]
        caches = [cache_sizes(vlm, variant, model, inputs) for variant in variants]
    finally:
        if was_attached:
            handle.attach()
    placeholders = inputs["input_ids"] == vlm.inner.config.image_token_id  # (B, L)
    return {
        "plan": str(handle.plan),
        "batch_size": len(inputs["input_ids"]),
        "prompt_tokens": inputs["input_ids"].shape[1],
        "vision_tokens": int(placeholders.sum(1).amax()),
        "new_tokens": new_tokens,
        "layers": [vars(row) for row in handle.ledger],
        "changed": handle.has_cut,
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
    """Random prompts for a LLaVA on the model's device, each a noise image between random words."""
    vlm = open_model(model)
    config, vision = vlm.inner.config, vlm.inner.config.vision_config
    if vlm.family != "LLaVA":
        raise UserError(f"random prompts can be made for LLaVA only; for {vlm.family}, pass the output of its processor")
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(
        config.text_config.vocab_size // 2, config.text_config.vocab_size - 1, (batch_size, text_tokens), generator=generator
    )
    words = torch.where(words == config.image_token_id, words + 1, words)
    image = torch.full((batch_size, image_tokens(vlm)), config.image_token_id)
    ids = torch.cat([words[:, :1], image, words[:, 1:]], dim=1)
    pixels = torch.randn(batch_size, 3, vision.image_size, vision.image_size, generator=generator)
    where = next(model.parameters())
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels.to(where.dtype)}
    return {name: value.to(where.device) for name, value in inputs.items()}


def in_shares(vlm: Vlm, handle: Handle) -> Plan:
    """The plan with every number of tokens as a share of the tokens that arrive, for images of the model's own size.

    Shares are rounded down to as many digits as needed to keep the same numbers of tokens on this model.
    """
    n, steps = image_tokens(vlm), []
    for cut in place_plan(handle.plan, vlm.tower, 0, vlm.decoder.depth, handle.parts):
        keep = cut.count(n)
        given = {name: value for name, value in cut.step.explicit_options if name != "m" or cut.step.method.budget is None}
        if cut.budget.kind == "share" or keep < n:
            share = cut.budget if cut.budget.kind == "share" else token_share(keep, n)
            steps.append(make_step(cut.step.method, Where.parse(cut.name), share, given))
        n = keep + (cut.step.rest == "fuse" and keep < n)
    return Plan(tuple(steps))


def image_tokens(vlm: Vlm) -> int:
    """Tokens of an image in a LLaVA: its patches, and CLS if the decoder gets it (then the tower cannot be cut)."""
    config, vision = vlm.inner.config, vlm.inner.config.vision_config
    includes_cls = config.vision_feature_select_strategy == "full" and vlm.tower is None
    return int((vision.image_size // vision.patch_size) ** 2 + includes_cls)


def token_share(keep: int, n: int) -> Budget:
    """keep / n as a share in hundredths of a percent, or finer where that would keep fewer tokens."""
    units = 10_000
    while math.ceil(Fraction(keep * units // n, units) * n) < keep:
        units *= 10
    return Budget("share", Fraction(keep * units // n, units))


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {phase: statistics.median(row[phase] for row in rounds) for phase in PHASES}


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> float | None:
    """The median ratio; None if there is nothing to compare (with one new token there is no decode step)."""
    return median_ratio(slow, fast) if all(fast) else None
