"""The phases of one generate(): tower, selection, prefill, decoding. Seconds and FLOPs of each, and the size of the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.cutting.handle import Handle
from tokensieve.device import synchronize, timed
from tokensieve.errors import UserError
from tokensieve.models.patching import Patch
from tokensieve.models.registry import open_vlm
from tokensieve.models.tower import Undo
from tokensieve.models.vlm import Vlm

PHASES = ("tower", "selection", "prefill", "prefill_with_selection", "decode", "other", "first", "total")
Inputs = Mapping[str, Tensor]


@dataclass
class Meter:
    """Adds up what a clock counts in each phase of one generate(), inside its `with` block.

    Hooks on the tower and the decoder separate the phases; the handle reports the work that the plan adds (`Handle.observer`).
    """

    vlm: Vlm
    handle: Handle | None
    clock: Callable[[], float]
    tower: float = 0.0
    selection: float = 0.0  # work of the plan before the first new token
    prefill: float = 0.0
    llm: float = 0.0  # prefill and the selection inside the language model
    decode: list[float] = field(default_factory=list)  # of each step
    first: float = 0.0
    _undo: list[Undo] = field(default_factory=list)
    _began: float = 0.0
    _is_prefill: bool = True  # the prompt has not been read yet
    _works: list[bool] = field(default_factory=list)  # the work under way, innermost last; True: of the plan
    _since: float = 0.0  # the clock at the last change

    def __enter__(self) -> Meter:
        if self.handle is not None:
            self._undo.append(self.handle.attach().remove)
            self.handle.observer = self
        for name in ("vision_tower", "visual", "multi_modal_projector"):
            if isinstance(module := getattr(self.vlm.inner, name, None), nn.Module):
                self._watch(module, self._end_tower)
        self._watch(self.vlm.decoder.module, self._end_decoder)
        self._began = self.clock()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.handle is not None:
            self.handle.observer = None
        while self._undo:
            self._undo.pop()()

    def plan_work(self) -> AbstractContextManager[None]:
        """Called by the handle around the work of the plan."""
        return self._work(by_plan=True)

    def model_work(self) -> AbstractContextManager[None]:
        """Called by the handle around the work of the model."""
        return self._work(by_plan=False)

    @contextmanager
    def _work(self, by_plan: bool) -> Iterator[None]:
        self._add_selection()
        self._works.append(by_plan)
        try:
            yield
        finally:
            self._add_selection()
            self._works.pop()

    def _add_selection(self) -> None:
        """Counts the clock since the last change as selection, if the plan was working."""
        now = self.clock()
        if self._works and self._works[-1] and self._is_prefill:
            self.selection += now - self._since
        self._since = now

    def _watch(self, module: nn.Module, end: Callable[[float, float], None]) -> None:
        """Calls end(duration, selection inside it) after each call of a module."""
        marks: list[float] = []

        def enter(*_: Any) -> None:
            self._add_selection()
            marks[:] = [self.selection, self.clock()]

        def leave(*_: Any) -> None:
            self._add_selection()
            before, entered = marks
            end(self.clock() - entered, self.selection - before)

        self._undo += [
            module.register_forward_pre_hook(Patch(enter), prepend=True).remove,
            module.register_forward_hook(Patch(leave)).remove,
        ]

    def _end_tower(self, took: float, selection: float) -> None:
        self.tower += took - selection

    def _end_decoder(self, took: float, selection: float) -> None:
        if not self._is_prefill:
            self.decode.append(took)
            return
        self.llm, self.prefill = took, took - selection
        self.first = self.clock() - self._began
        self._is_prefill = False


def open_model(model: nn.Module) -> Vlm:
    """The parts of a vision-language model; a UserError for any other model."""
    vlm = open_vlm(model)
    if vlm is None:
        raise UserError(f"{type(model).__name__} is not a vision-language model; measure it without --model_type vlm")
    return vlm


def plan_on(handle: Handle | None) -> AbstractContextManager[Any]:
    """Attaches the handle inside the `with` block; does nothing without a handle."""
    return nullcontext() if handle is None else handle


def generate_answer(model: Any, inputs: Inputs, new_tokens: int) -> Callable[[], Any]:
    """A function that generates exactly this number of tokens."""
    options = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1, "use_cache": True, "eos_token_id": None}

    @torch.no_grad()
    def call() -> Any:
        return model.generate(**inputs, **options)

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
    """GFLOPs up to the first new token, by phase; the mean over the prompts."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, Meter(vlm, handle, counter.get_total_flops) as meter:
        generate_answer(model, inputs, 1)()
    counted = {phase: getattr(meter, phase) for phase in ("tower", "selection", "prefill", "llm")}
    return {
        phase: flops / len(inputs["input_ids"]) / 1e9 for phase, flops in (counted | {"all": counter.get_total_flops()}).items()
    }


def cache_sizes(vlm: Vlm, handle: Handle | None, model: Any, inputs: Inputs) -> dict[str, Any]:
    """Tokens of a prompt in the cache of each layer after the prefill, and MiB of all layers and prompts."""
    with torch.no_grad(), plan_on(handle):
        cache = model(**inputs, use_cache=True, logits_to_keep=1).past_key_values
    layers = [cache.layers[number] for number in range(vlm.decoder.depth)]
    return {
        "tokens": [layer.keys.shape[-2] for layer in layers],
        "mib": sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) / 2**20,
    }
