"""The phases of one generate(): tower, selection, prefill, decoding. Seconds and FLOPs of each, the cache, and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.cutting.handle import Handle
from tokensieve.errors import UserError
from tokensieve.measuring.clock import read_clock, watch
from tokensieve.measuring.memory import peak_memory
from tokensieve.measuring.oracle import StockOracle
from tokensieve.models.patching import Patch
from tokensieve.models.registry import open_vlm
from tokensieve.models.tower import Undo
from tokensieve.models.vlm import Vlm

PHASES = ("tower", "selection", "prefill", "prefill_with_selection", "prompt", "decode", "other", "first", "total")
Inputs = Mapping[str, Tensor]
Arm = Handle | StockOracle | None  # what is attached to the model; None: nothing, it is the full one


@dataclass
class Meter:
    """Adds up what a clock counts in each phase of one generate(), inside its `with` block.

    Hooks on the model, its tower and its decoder separate the phases; the handle reports the work that the plan adds
    (`Handle.observer`). That takes some time in every layer, so it is left out if `observes` is False; the work in the tower
    then counts as tower, and the rest as prefill.
    """

    vlm: Vlm
    arm: Arm
    clock: Callable[[], float]
    observes: bool = True
    tower: float = 0.0
    selection: float = 0.0  # work of the plan before the first new token
    prefill: float = 0.0
    llm: float = 0.0  # prefill and the selection inside the language model
    first: float = 0.0  # until the logits of the first new token are there
    decode: list[float] = field(default_factory=list)  # the model's forward in each step after it
    _undo: list[Undo] = field(default_factory=list)
    _began: float = 0.0
    _is_prefill: bool = True  # the language model has not read the prompt yet
    _is_first: bool = True  # the first logits are not there yet
    _works: list[bool] = field(default_factory=list)  # the work under way, innermost last; True: of the plan
    _since: float = 0.0  # the clock at the last change

    def __enter__(self) -> Meter:
        if self.arm is not None:
            self.arm.__enter__()
            self._undo.append(partial(self.arm.__exit__, None, None, None))
        if isinstance(self.arm, Handle) and self.observes:
            self.arm.observer = self
        for name in ("vision_tower", "visual", "multi_modal_projector"):
            if isinstance(module := getattr(self.vlm.inner, name, None), nn.Module):
                self._watch(module, self._end_tower)
        self._watch(self.vlm.decoder.module, self._end_decoder)
        self._watch(self.vlm.model, self._end_model)
        self._began = self.clock()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(self.arm, Handle):
            self.arm.observer = None
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
        if self._is_prefill:
            self.llm, self.prefill, self._is_prefill = took, took - selection, False

    def _end_model(self, took: float, selection: float) -> None:
        if self._is_first:
            self.first, self._is_first = self.clock() - self._began, False
        else:
            self.decode.append(took)


def open_model(model: nn.Module) -> Vlm:
    """The parts of a vision-language model; a UserError for any other model."""
    vlm = open_vlm(model)
    if vlm is None:
        raise UserError(f"{type(model).__name__} is not a vision-language model; measure it without --model_type vlm")
    return vlm


def attached(arm: Arm) -> AbstractContextManager[Any]:
    """Attaches a plan or its oracle inside the `with` block; does nothing for the full model."""
    return nullcontext() if arm is None else arm


def generate_answer(model: Any, inputs: Inputs, new_tokens: int) -> Callable[[], Any]:
    """A function that generates exactly this number of tokens."""
    options = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1, "use_cache": True, "eos_token_id": None}

    @torch.no_grad()
    def call() -> Any:
        return model.generate(**inputs, **options)

    return call


def time_answer(vlm: Vlm, arm: Arm, answer: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Seconds of one answer: of reading the prompt, of a decode step, and in total, also by the wall clock."""
    with Meter(vlm, arm, partial(read_clock, device), observes=False) as meter:
        took = watch(answer, device)
    decode = sum(meter.decode) / max(1, len(meter.decode))
    prompt = meter.first - meter.tower
    return {"prompt": prompt, "decode": decode, "first": meter.first, "total": took.counted(device), "wall": took.wall}


def split_phases(vlm: Vlm, handle: Handle | None, answer: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Seconds of one answer: of the tower, of what the plan adds, of the language model, and of the rest."""
    with Meter(vlm, handle, partial(read_clock, device)) as meter:
        took = watch(answer, device).counted(device)
    return {
        "tower": meter.tower,
        "selection": meter.selection,
        "prefill": meter.prefill,
        "prefill_with_selection": meter.prefill + meter.selection,
        "other": took - meter.tower - meter.selection - meter.prefill - sum(meter.decode),
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


def read_prompt(
    vlm: Vlm, arm: Arm, model: Any, inputs: Inputs, with_memory: bool = True
) -> tuple[dict[str, Any], float | None]:
    """The cache after the prompt was read, and the peak memory of reading it in MiB (without weights and input).

    Of the cache: tokens of a prompt in each layer, and MiB of all layers and prompts.
    """
    caches = []

    @torch.no_grad()
    def call() -> None:
        caches.append(model(**inputs, use_cache=True, logits_to_keep=1).past_key_values)

    with attached(arm):
        peak = peak_memory(call, inputs["input_ids"].device) if with_memory else call()
    layers = [caches[0].layers[number] for number in range(vlm.decoder.depth)]
    tokens = [layer.keys.shape[-2] for layer in layers]
    return {"tokens": tokens, "mib": sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) / 2**20}, peak
