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

import copy
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.device import find_device, synchronize, timed
from tokensieve.errors import Uncuttable, UserError
from tokensieve.handle import Handle, PlanWarning, apply, place
from tokensieve.models import Undo, open_vlm
from tokensieve.models.vlm import Vlm
from tokensieve.parts import Weights
from tokensieve.patching import Patch, replace
from tokensieve.plan import Budget, Plan, Where, make_step

PLAN = "anchor@out:50%"
BATCHES = (1, 16)
SIDES = (4, 7, 10, 14, 20, 24)  # patches a side, for the break-even point
PHASES = ("tower", "selection", "prefill", "prefill_with_selection", "decode", "other", "first", "total")
RATIOS = ("tower", "prefill", "prefill_with_selection", "decode", "first", "total")
Inputs = Mapping[str, Tensor]


@dataclass
class Meter:
    """Adds up what a clock shows in each phase of one generate(), by hooks that are there while it is entered."""

    vlm: Vlm
    handle: Handle | None
    clock: Callable[[], float]
    tower: float = 0.0
    selection: float = 0.0  # before the first new token
    prefill: float = 0.0
    llm: float = 0.0  # prefill and the selection inside the language model
    decode: list[float] = field(default_factory=list)  # of each step
    first: float = 0.0
    _undo: list[Undo] = field(default_factory=list)
    _began: float = 0.0
    _reading: bool = True  # the prompt has not been read yet

    def __enter__(self) -> Meter:
        inner, decoder = self.vlm.inner, self.vlm.decoder
        around = [self._below(layer, "forward") for layer in decoder.layers]
        around += [self._below(inner, "get_image_features"), self._below(inner, "get_placeholder_mask")]
        around.append(self._below(self.vlm.model, "generate"))
        if self.handle is not None:
            self._undo.append(self.handle.attach().remove)  # what it puts over a method stands around ours
            for name in ("_begin", "_cut"):
                self._undo.append(replace(self.handle, name, self._selecting(getattr(self.handle, name))))
        for above in around:
            above()
        self._phase(inner, lambda *_: None)  # for the plan's hooks alone
        for name in ("vision_tower", "visual", "multi_modal_projector"):
            if isinstance(module := getattr(inner, name, None), nn.Module):
                self._phase(module, self._in_tower)
        self._phase(decoder.module, self._in_decoder)
        self._began = self.clock()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._undo:
            self._undo.pop()()

    def _phase(self, module: nn.Module, done: Callable[[float, float], None]) -> None:
        """Calls done(what passed, how much of it was selection) after each call; what the plan's hooks took is selection."""
        marks: list[float] = []

        def start(*_: Any) -> None:
            marks[:] = [self.selection, self.clock()]

        def begin(*_: Any) -> None:
            self._select(self.clock() - marks[1])

        def finish(*_: Any) -> None:
            marks.append(self.clock())

        def end(*_: Any) -> None:
            left = self.clock()
            before, entered, finished = marks
            self._select(left - finished)
            done(left - entered, self.selection - before)

        self._undo += [
            module.register_forward_pre_hook(Patch(start), prepend=True).remove,
            module.register_forward_pre_hook(Patch(begin)).remove,
            module.register_forward_hook(Patch(finish), prepend=True).remove,
            module.register_forward_hook(Patch(end)).remove,
        ]

    def _below(self, owner: Any, name: str) -> Callable[[], None]:
        """What passes between a method's call and the stock method is selection: the plan stands between them.

        What is returned is called when the plan is on: it watches the calls, as this does the stock method.
        """
        stock, marks = getattr(owner, name), [0.0, 0.0]

        @functools.wraps(stock)
        def below(*args: Any, **kwargs: Any) -> Any:
            self._select(self.clock() - marks[0])
            out = stock(*args, **kwargs)
            marks[1] = self.clock()
            return out

        def above() -> None:
            planned = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                marks[0] = self.clock()
                out = planned(*args, **kwargs)
                self._select(self.clock() - marks[1])
                return out

            self._undo.append(replace(owner, name, call))

        self._undo.append(replace(owner, name, below))
        owner.__dict__[name] = below  # bare: attach() would take a patch for another plan
        return above

    def _select(self, took: float) -> None:
        if self._reading:
            self.selection += took

    def _selecting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed_step(*args: Any) -> Any:
            start = self.clock()
            out = step(*args)
            self._select(self.clock() - start)
            return out

        return timed_step

    def _in_tower(self, took: float, added: float) -> None:
        self.tower += took - added

    def _in_decoder(self, took: float, added: float) -> None:
        if not self._reading:
            self.decode.append(took)
            return
        self.llm, self.prefill = took, took - added
        self.first = self.clock() - self._began
        self._reading = False


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

    vlm = _opened(model)
    handle = plan if isinstance(plan, Handle) else _fresh(model, plan, weights)
    was_on = bool(handle._undo)
    handle.remove()
    device = inputs["input_ids"].device
    try:
        answer = _answer(model, inputs, new_tokens)
        arms = (None, handle)
        for arm in arms:  # warm-up
            with _on(arm):
                answer()
        rounds: list[list[dict[str, float]]] = [[], []]
        for turn in trange(repeats, desc=f"batch {len(inputs['input_ids'])}", unit="round", disable=quiet, leave=False):
            for number in (turn % 2, 1 - turn % 2):
                with _on(arms[number]):
                    total = timed(answer, device)[1]
                rounds[number].append({**_split(vlm, arms[number], answer, device), "total": total})
        full, reduced = rounds
        work = [_work(vlm, arm, model, inputs) for arm in arms]
        caches = [_cache(vlm, arm, model, inputs) for arm in arms]
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
    vlm = _opened(model)
    if vlm.family != "LLaVA":
        raise Uncuttable(f"the break-even point is measured on LLaVA alone; {vlm.family} sizes its images by itself")
    handle = plan if isinstance(plan, Handle) else _fresh(model, plan, weights)
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


def prompts(model: nn.Module, batch_size: int, text_tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Prompts for a LLaVA, each an image of noise between words of noise, on the model's device."""
    vlm = _opened(model)
    config, vision = vlm.inner.config, vlm.inner.config.vision_config
    if vlm.family != "LLaVA":
        raise UserError(f"prompts of noise can be made for LLaVA alone; give {vlm.family} what its processor makes")
    made = torch.Generator().manual_seed(seed)
    words = torch.randint(
        config.text_config.vocab_size // 2, config.text_config.vocab_size - 1, (batch_size, text_tokens), generator=made
    )
    words = torch.where(words == config.image_token_id, words + 1, words)
    image = torch.full((batch_size, _image_tokens(vlm)), config.image_token_id)
    ids = torch.cat([words[:, :1], image, words[:, 1:]], dim=1)
    pixels = torch.randn(batch_size, 3, vision.image_size, vision.image_size, generator=made)
    where = next(model.parameters())
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels.to(where.dtype)}
    return {name: value.to(where.device) for name, value in inputs.items()}


def in_shares(vlm: Vlm, handle: Handle) -> Plan:
    """The plan with every count of tokens as the share that it is of those that arrive, on images of the model's own size.

    Its text reads as the same plan: shares are rounded down to so many digits that on this model each keeps what it kept.
    """
    n, steps = _image_tokens(vlm), []
    for cut in place(handle.plan, vlm.tower, 0, vlm.decoder.depth, handle.parts):
        keep = cut.budget.count(n)
        given = {name: value for name, value in cut.step.given.items() if name != "m" or cut.step.method.budget is None}
        if cut.budget.kind == "share" or keep < n:
            share = cut.budget if cut.budget.kind == "share" else _share(keep, n)
            steps.append(make_step(cut.step.method, Where.parse(cut.name), share, given))
        n = keep + (cut.step.rest == "fuse" and keep < n)
    return Plan(tuple(steps))


def run(
    model: str | None = None,
    plans: Sequence[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
    repeats: int = 10,
    new_tokens: int = 16,
    text_tokens: int = 16,
    device: str | None = None,
    output: str | None = None,
    quiet: bool = False,
    weights: Weights = None,
    crossing: bool = False,
) -> list[dict[str, Any]]:
    """Measures every plan at every batch size; prints tables, writes JSON to output, returns the rows.

    model: as load_vlm takes it; crossing: look for the break-even point too.
    """
    from tokensieve import embedded, results
    from tokensieve.models import load_vlm

    parsed = [Plan.parse(plan) for plan in plans or [PLAN]]
    if output is not None:
        results.check_writable(Path(output))
    where = find_device(device)
    name = model or embedded.LLAVA
    net = load_vlm.load(name, where).model
    about = {"model": name, "model_type": "vlm", "device": str(where)}
    rows, points = [], []
    for plan in parsed:
        handle = _fresh(net, plan, weights)
        for batch_size in batch_sizes or BATCHES:
            row = measure(net, prompts(net, batch_size, text_tokens), handle, repeats, new_tokens, quiet=quiet)
            rows.append(about | row)
        if crossing:
            points.append(break_even(net, handle, batch_sizes or BATCHES, text_tokens=text_tokens, quiet=quiet))
    if output is not None:
        if Path(output).exists():
            results.move_aside(Path(output))
        results.write_json(Path(output), {"rows": rows, "break_even": points, "versions": results.versions()})
    if not quiet:
        _print_table(rows)
        _print_points(points)
    return rows


# -------------------------------------------------------------------------------------------------------------- details


def _opened(model: nn.Module) -> Vlm:
    vlm = open_vlm(model)
    if vlm is None:
        raise UserError(f"{type(model).__name__} is no vision-language model; measure it without --model_type vlm")
    return vlm


def _fresh(model: nn.Module, plan: Plan | str, weights: Weights) -> Handle:
    """A handle off the model; its notes are in the rows, so it says nothing."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    trained = plan.is_trained
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        with apply(model, plan, weights=weights if trained else None) as handle:
            return handle


def _on(handle: Handle | None) -> AbstractContextManager[Any]:
    """The handle on the model, then off again; nothing where there is none."""
    return nullcontext() if handle is None else handle


def _answer(model: Any, inputs: Inputs, new_tokens: int) -> Callable[[], Any]:
    """A call that generates exactly so many tokens."""
    how = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1, "use_cache": True, "eos_token_id": None}

    @torch.no_grad()
    def call() -> Any:
        return model.generate(**inputs, **how)

    return call


def _split(vlm: Vlm, handle: Handle | None, answer: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Seconds of each phase of one answer."""

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    with Meter(vlm, handle, clock) as meter:
        took = timed(answer, device)[1]
    decode = sum(meter.decode)
    return {
        "tower": meter.tower,
        "selection": meter.selection,
        "prefill": meter.prefill,
        "prefill_with_selection": meter.prefill + meter.selection,
        "decode": decode / max(1, len(meter.decode)),
        "other": took - meter.tower - meter.selection - meter.prefill - decode,
        "first": meter.first,
    }


def _work(vlm: Vlm, handle: Handle | None, model: nn.Module, inputs: Inputs) -> dict[str, float]:
    """GFLOPs of a prompt up to its first new token, the mean of these, divided as the seconds are."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, Meter(vlm, handle, counter.get_total_flops) as meter:
        _answer(model, inputs, 1)()
    counted = {phase: getattr(meter, phase) for phase in ("tower", "selection", "prefill", "llm")}
    return {
        phase: flops / len(inputs["input_ids"]) / 1e9 for phase, flops in (counted | {"all": counter.get_total_flops()}).items()
    }


def _cache(vlm: Vlm, handle: Handle | None, model: Any, inputs: Inputs) -> dict[str, Any]:
    """Tokens that each layer's cache holds for a prompt after it was read, and MiB of all layers and prompts."""
    with torch.no_grad(), _on(handle):
        cache = model(**inputs, use_cache=True, logits_to_keep=1).past_key_values
    held = [cache.layers[number] for number in range(vlm.decoder.depth)]
    return {
        "tokens": [layer.keys.shape[-2] for layer in held],
        "mib": sum(layer.keys.nbytes + layer.values.nbytes for layer in held) / 2**20,
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


def _image_tokens(vlm: Vlm) -> int:
    """Tokens that a LLaVA makes of an image: its patches, and CLS where that is shown (and the tower cannot be cut)."""
    config, vision = vlm.inner.config, vlm.inner.config.vision_config
    shows_cls = config.vision_feature_select_strategy == "full" and vlm.tower is None
    return int((vision.image_size // vision.patch_size) ** 2 + shows_cls)


def _share(keep: int, n: int) -> Budget:
    """The share that is keep of n, in hundredths of a percent, or finer where it would be fewer tokens otherwise."""
    parts = 10_000
    while math.ceil(Fraction(keep * parts // n, parts) * n) < keep:
        parts *= 10
    return Budget("share", Fraction(keep * parts // n, parts))


def _crossing(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The smallest number of vision tokens from which on the plan is faster at every number measured; None: it never is."""
    found = None
    for row in sorted(rows, key=lambda row: row["vision_tokens"]):
        if row["speedup"] <= 1:
            found = None
        elif found is None:
            found = row["vision_tokens"]
    return found


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {phase: statistics.median(row[phase] for row in rounds) for phase in PHASES}


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> float | None:
    """The median of slow / fast within each round; None where there is nothing to compare (one new token: no decode)."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True)) if all(fast) else None


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    print(
        f"{first['model']} on {first['device']}, medians of {first['repeats']} interleaved rounds; "
        f"{first['vision_tokens']} vision tokens in a prompt of {first['prompt_tokens']}"
    )
    for plan in dict.fromkeys(row["plan"] for row in rows):
        table = Table(title=plan, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        times = ("tower\nms", "select\nms", "prefill\nms", "both\nms", "decode\nms", "first\nms", "total\nms")
        for head in ("B", "", *times, "LLM\nGFLOPs", "all\nGFLOPs", "cache\nMiB"):
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        shown = [phase for phase in PHASES if phase != "other"]
        held = (("gflops", "llm"), ("gflops", "all"), ("cache", "mib"))
        for row in (row for row in rows if row["plan"] == plan):
            for name, end in (("full", "_full"), ("plan", "")):
                spent = [row[f"seconds{end}"][phase] * 1e3 for phase in shown] + [row[f"{kind}{end}"][of] for kind, of in held]
                table.add_row(str(row["batch_size"]) if end else "", name, *map(_brief, spent))
            faster = [row["speedup"].get(phase) for phase in shown]
            less = [row[f"{kind}_full"][of] / row[kind][of] for kind, of in held]
            table.add_row("", "ratio", *("" if ratio is None else f"{ratio:.2f}x" for ratio in (*faster, *less)))
        Console().print(table)
    print(
        "select: what the plan adds (full: the stopwatch itself); both: select + prefill; decode: one new token;\n"
        f"first: until the prompt is read; total: {first['new_tokens']} new tokens; GFLOPs of a prompt: of the language model "
        "with what\nthe plan does in it, and of all up to the first new token"
    )


def _brief(value: float) -> str:
    """Three digits, without exponents, so that a table fits 80 columns."""
    return f"{value:.3f}" if value < 1 else f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _print_points(points: Sequence[Mapping[str, Any]]) -> None:
    for point in points:
        print(f"Break-even of {point['plan']} (first token; models of this shape with random weights):")
        for size, n in point["vision_tokens"].items():
            measured = ", ".join(
                f"{row['vision_tokens']}: {row['speedup']:.2f}x" for row in point["rows"] if str(row["batch_size"]) == size
            )
            told = "not faster at any number of vision tokens" if n is None else f"faster from {n} vision tokens on"
            print(f"  batch {size}: {told} ({measured})")
