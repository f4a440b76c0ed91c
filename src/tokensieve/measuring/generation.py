"""Measuring a vision-language model with and without plans: tower, selection, prefill, decode.

Full model, plans and their oracles answer the same prompts in interleaved rounds. The phases are:

    tower       vision tower and projector, without the selection inside; includes the slower kernels of blocks that are
                opened because the plan needs their attention
    selection   all other work of the plan until the prompt is read: scores, merges, pruner heads, masks, gathers, and putting
                the features back to their positions. Of the full model: the time of the stopwatch itself at those points
    prefill     the language model over the prompt, without the selection inside
    prefill_with_selection   the sum of both: the plan saves time in the first and spends it in the second
    prompt      everything but the tower up to the first logits: preparations of generate(), embeddings, placeholders, language
                model, norm, head, and the work of the plan behind the tower
    decode      the model's forward pass for one new token, with the work of the plan
    other       the rest of generate(): choosing tokens, bookkeeping
    first       from the start until the logits of the first new token
    total       all of generate()

Tower, selection, prefill and other come from a run in which the plan reports its work, the others from a run in which only the
ends of tower, language model and model are observed. The oracle (oracle.py) takes part in the latter.

FLOPs are divided into the same phases, with a FLOP counter instead of the clock. `llm` is the language model over the prompt
with the work of the plan in it, and `all` is everything up to the first new token: gflops_llm and gflops of an eval.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.cutting.handle import Handle
from tokensieve.errors import UserError
from tokensieve.measuring.clock import counts_cpu_time
from tokensieve.measuring.oracle import StockOracle
from tokensieve.measuring.phases import (
    Arm,
    Inputs,
    attached,
    count_work,
    generate_answer,
    open_model,
    read_prompt,
    split_phases,
    time_answer,
)
from tokensieve.measuring.rounds import Ratio, detached_handle, phase_entries, rotated
from tokensieve.models.vlm import Vlm
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan
from tokensieve.terminal import progress

PLAN = "anchor@out:50%"
BATCHES = (1, 16)
RATIOS = ("tower", "prefill", "prefill_with_selection", "prompt", "decode", "first", "total")
REALIZED = ("prompt", "decode", "first", "total")  # phases that are compared with the oracle
EVERYTHING = frozenset(("phases", "oracle", "memory", "gflops"))  # what a row can tell besides times and caches
Rounds = list[dict[str, float]]  # seconds of each phase, in each round


def measure(
    model: nn.Module,
    inputs: Inputs,
    plan: Plan | str | Handle,
    repeats: int = 10,
    new_tokens: int = 16,
    *,
    weights: Weights = None,
    what: Collection[str] = EVERYTHING,
    quiet: bool = True,
) -> dict[str, Any]:
    """One row: seconds of each phase for full model, plan and oracle, ratios, GFLOPs, cache and memory, for these prompts.

    inputs: the output of the processor, on the model's device. A handle that is attached is attached again afterwards.
    what: the parts of EVERYTHING to measure: "phases" are those inside the plan, which need a run of their own.
    """
    open_model(model)  # raises here if it is no vision-language model
    handle = plan if isinstance(plan, Handle) else detached_handle(model, plan, weights)
    return measure_all(model, inputs, [handle], repeats, new_tokens, what=what, quiet=quiet)[0]


def measure_all(
    model: nn.Module,
    inputs: Inputs,
    handles: Sequence[Handle],
    repeats: int = 10,
    new_tokens: int = 16,
    *,
    what: Collection[str] = EVERYTHING,
    quiet: bool = True,
) -> list[dict[str, Any]]:
    """`measure` for several plans in the same rounds, one row each."""
    vlm = open_model(model)
    were_attached = [handle for handle in handles if handle.is_attached]
    for handle in handles:
        handle.remove()
    try:
        return _measure_detached(vlm, inputs, handles, repeats, new_tokens, what, quiet)
    finally:
        for handle in were_attached:
            handle.attach()


def _measure_detached(
    vlm: Vlm, inputs: Inputs, handles: Sequence[Handle], repeats: int, new_tokens: int, what: Collection[str], quiet: bool
) -> list[dict[str, Any]]:
    model, device, batch_size = vlm.model, inputs["input_ids"].device, len(inputs["input_ids"])
    read = []  # of the full model and of each plan: cache, peak memory; also their warm-up
    for handle in (None, *handles):
        if handle is not None and "memory" in what:
            handle.restart()  # it holds nothing of an earlier pass
        read.append(read_prompt(vlm, handle, model, inputs, with_memory="memory" in what))
    oracles = [
        _oracle(vlm, handle, inputs, cache["tokens"], "oracle" in what)
        for handle, (cache, _) in zip(handles, read[1:], strict=True)
    ]
    arms: list[Arm] = [None, *handles, *(oracle for oracle in oracles if isinstance(oracle, StockOracle))]
    answers = [generate_answer(model, arm.inputs if isinstance(arm, StockOracle) else inputs, new_tokens) for arm in arms]
    for arm, answer in zip(arms, answers, strict=True):
        if isinstance(arm, StockOracle):
            with attached(arm):
                answer()  # warm-up
    times: list[Rounds] = [[] for _ in arms]
    bar = progress.bar(range(repeats), desc=f"batch {batch_size}", unit="round", quiet=quiet, leave=False)
    for number in rotated(len(arms), bar):
        arm, answer = arms[number], answers[number]
        times[number].append(time_answer(vlm, arm, answer, device))
        if "phases" in what and not isinstance(arm, StockOracle):
            times[number][-1] |= split_phases(vlm, arm, answer, device)
    work = [count_work(vlm, handle, model, inputs) for handle in (None, *handles)] if "gflops" in what else []
    of_oracles = iter(times[1 + len(handles) :])
    placeholders = inputs["input_ids"] == vlm.inner.config.image_token_id  # (B, L)
    rows = []
    for i, (handle, oracle) in enumerate(zip(handles, oracles, strict=True), start=1):
        row = {
            "plan": str(handle.plan),
            "batch_size": batch_size,
            "prompt_tokens": inputs["input_ids"].shape[1],
            "vision_tokens": int(placeholders.sum(1).amax()),
            "new_tokens": new_tokens,
            "layers": [vars(row) for row in handle.ledger],
            "changed": handle.has_cut,
            "clock": "cpu" if counts_cpu_time(device) else "wall",
            **_compare(times[0], times[i], next(of_oracles) if isinstance(oracle, StockOracle) else None),
            "no_oracle_reason": oracle if isinstance(oracle, str) else None,
            "cache_full": read[0][0],
            "cache": read[i][0],
            "peak_mib_full": read[0][1],
            "peak_mib": read[i][1],
            "repeats": repeats,
            "notes": handle.notes,
        }
        rows.append(row | {"gflops_full": work[0], "gflops": work[i]} if work else row)
    return rows


def _oracle(vlm: Vlm, handle: Handle, inputs: Inputs, lengths: Sequence[int], is_wanted: bool) -> StockOracle | str:
    """The oracle of a plan, or why there is none."""
    reason = StockOracle.refusal(vlm, handle, inputs) if is_wanted else "it was not measured"
    return StockOracle(vlm, handle, inputs, lengths) if reason is None else reason


def _compare(full: Rounds, plan: Rounds, oracle: Rounds | None) -> dict[str, Any]:
    """The times of a row, and their ratios."""
    phases = [phase for phase in RATIOS if phase in full[0]]
    entries: dict[str, Any] = {"seconds_full": _medians(full), "seconds": _medians(plan)}
    entries["seconds_oracle"] = None if oracle is None else _medians(oracle)
    for name, rounds in (("wall_seconds_full", full), ("wall_seconds", plan), ("wall_seconds_oracle", oracle)):
        entries[name] = None if rounds is None else statistics.median(row["wall"] for row in rounds)
    entries |= phase_entries("speedup", {phase: _ratio(full, plan, phase) for phase in phases})
    realized = {phase: None if oracle is None else _ratio(oracle, plan, phase) for phase in REALIZED}
    return entries | phase_entries("realized", realized)


def _medians(rounds: Rounds) -> dict[str, float]:
    return {phase: statistics.median(row[phase] for row in rounds) for phase in rounds[0] if phase != "wall"}


def _ratio(slow: Rounds, fast: Rounds, phase: str) -> Ratio | None:
    """None if there is nothing to compare: with one new token there is no decode step."""
    times = [[row[phase] for row in rounds] for rounds in (slow, fast)]
    return Ratio.of(*times) if all(times[0]) and all(times[1]) else None


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


def image_tokens(vlm: Vlm) -> int:
    """Tokens of an image in a LLaVA: its patches, and CLS if the decoder gets it (then the tower cannot be cut)."""
    config, vision = vlm.inner.config, vlm.inner.config.vision_config
    includes_cls = config.vision_feature_select_strategy == "full" and vlm.tower is None
    return int((vision.image_size // vision.patch_size) ** 2 + includes_cls)
