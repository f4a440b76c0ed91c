"""TODO docstring."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.cutting.handle import Handle, apply
from tokensieve.device import synchronize, timed
from tokensieve.errors import PlanWarning, UserError
from tokensieve.models.patching import Patch, replace
from tokensieve.models.registry import open_vlm
from tokensieve.models.tower import Undo
from tokensieve.models.vlm import Vlm
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan

SIDES = (4, 7, 10, 14, 20, 24)  # patches a side, for the break-even point
PHASES = ("tower", "selection", "prefill", "prefill_with_selection", "decode", "other", "first", "total")
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


def open_model(model: nn.Module) -> Vlm:
    vlm = open_vlm(model)
    if vlm is None:
        raise UserError(f"{type(model).__name__} is no vision-language model; measure it without --model_type vlm")
    return vlm


def fresh_handle(model: nn.Module, plan: Plan | str, weights: Weights) -> Handle:
    """A handle off the model; its notes are in the rows, so it says nothing."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    trained = plan.is_trained
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        with apply(model, plan, weights=weights if trained else None) as handle:
            return handle


def plan_on(handle: Handle | None) -> AbstractContextManager[Any]:
    """The handle on the model, then off again; nothing where there is none."""
    return nullcontext() if handle is None else handle


def generate_answer(model: Any, inputs: Inputs, new_tokens: int) -> Callable[[], Any]:
    """A call that generates exactly so many tokens."""
    how = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1, "use_cache": True, "eos_token_id": None}

    @torch.no_grad()
    def call() -> Any:
        return model.generate(**inputs, **how)

    return call


def split_phases(vlm: Vlm, handle: Handle | None, answer: Callable[[], Any], device: torch.device) -> dict[str, float]:
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


def count_work(vlm: Vlm, handle: Handle | None, model: nn.Module, inputs: Inputs) -> dict[str, float]:
    """GFLOPs of a prompt up to its first new token, the mean of these, divided as the seconds are."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, Meter(vlm, handle, counter.get_total_flops) as meter:
        generate_answer(model, inputs, 1)()
    counted = {phase: getattr(meter, phase) for phase in ("tower", "selection", "prefill", "llm")}
    return {
        phase: flops / len(inputs["input_ids"]) / 1e9 for phase, flops in (counted | {"all": counter.get_total_flops()}).items()
    }


def cache_sizes(vlm: Vlm, handle: Handle | None, model: Any, inputs: Inputs) -> dict[str, Any]:
    """Tokens that each layer's cache holds for a prompt after it was read, and MiB of all layers and prompts."""
    with torch.no_grad(), plan_on(handle):
        cache = model(**inputs, use_cache=True, logits_to_keep=1).past_key_values
    held = [cache.layers[number] for number in range(vlm.decoder.depth)]
    return {
        "tokens": [layer.keys.shape[-2] for layer in held],
        "mib": sum(layer.keys.nbytes + layer.values.nbytes for layer in held) / 2**20,
    }
