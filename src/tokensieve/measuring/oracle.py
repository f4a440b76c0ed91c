"""The oracle of a plan: the same model on the same numbers of tokens at the same places, chosen at no cost.

It has all fixed costs of the stock model, so what separates a plan from it is the work of the plan: scores, merges, gathers,
masks. In a vision tower, the oracle is a plan that keeps the first tokens. Behind the tower, a vision-language model is the
stock one: prompts have as many placeholders as tokens arrive at the decoder, where a projector is cut it hands over the first
tokens of each image, and a layer of the decoder with a cut before it gets the end of the sequence, a view that is not even
copied. Its cache then has the lengths of the plan's, and decode steps are stock steps with that cache.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.cutting.handle import Handle
from tokensieve.cutting.passes import RESIZED, Row, UnevenRow
from tokensieve.measuring.decoder_tokens import DECODER
from tokensieve.measuring.rounds import detached_handle
from tokensieve.methods.registry import describe
from tokensieve.models.image_grid import IMAGE, name_arguments
from tokensieve.models.patching import replace as replace_method
from tokensieve.models.vlm import Vlm
from tokensieve.plan import Budget, Plan, Step, Where

OUT = "out"
GRIDS = "image_grid_thw"  # the input of Qwen-VL that tells the sizes of images


def first(view: View, keep: int) -> Reduction:
    """The first tokens: a choice that costs nothing."""
    index = torch.arange(keep, device=view.tokens.device).expand(view.tokens.shape[0], -1)
    return Reduction(index=index, n=view.n)


def _before_decoder(handle: Handle) -> list[Row]:
    return [row for row in handle.ledger if not row.layer.startswith(DECODER)]


def _tokens_of_image(vlm: Vlm, inputs: Mapping[str, Tensor]) -> int:
    """The placeholders of each image, where a family describes them; 0: they differ."""
    names = inspect.signature(vlm.inner.get_image_features).parameters
    given = {name: value for name, value in inputs.items() if name in names}
    totals = {layout.total for layout in vlm.layouts[IMAGE](vlm.inner, given, inputs["input_ids"])}
    return totals.pop() if len(totals) == 1 else 0


def _select(handed: Tensor | Sequence[Tensor], kept: Tensor) -> Tensor | list[Tensor]:
    """These tokens of all images (N,), in the form in which the model handed them over: a list, (N, E) or (..., E)."""
    if not isinstance(handed, Tensor):
        return [torch.cat(list(handed))[kept]]
    flat = handed.flatten(0, -2)[kept]
    return flat if handed.dim() == 2 else flat[None]


def oracle(handle: Handle) -> Plan:
    """The plan that cuts where the handle's last batch was cut, to the same numbers of tokens, at no cost."""
    return _first_tokens(handle, handle.ledger)


def _first_tokens(handle: Handle, ledger: Sequence[Row]) -> Plan:
    method = describe(first)
    image_steps = [step for step in handle.plan.steps if step.method.on_image]  # a smaller image is no choice of tokens
    cuts = [row for row in ledger if row.tokens_out < row.tokens_in and row.layer not in RESIZED]
    steps = (Step(method, Where.parse(row.layer), Budget("keep", Fraction(row.tokens_out))) for row in cuts)
    return Plan((*image_steps, *steps))


class StockOracle:
    """A stock vision-language model that reads one prompt, and continues it, with the numbers of tokens of a plan.

    Inside its `with` block the model runs so once, on `inputs`. handle: with the ledger of the plan's pass over the prompts;
    lengths: the tokens in the cache of each layer after it.
    """

    def __init__(self, vlm: Vlm, handle: Handle, inputs: Mapping[str, Tensor], lengths: Sequence[int]) -> None:
        self.vlm, self.lengths, self.inputs, self.whole = vlm, list(lengths), inputs, inputs
        self.tower: Handle | None = None
        self.projected: Tensor | None = None  # (N of all images,), the tokens that the projector hands over; None: all
        before = _before_decoder(handle)
        if before and vlm.out_is_projected:
            n = _tokens_of_image(vlm, inputs)
            kept = n - before[0].tokens_in + before[-1].tokens_out  # line ends stay
            self.inputs = self._shorten(inputs, n, kept)
            placeholders = int((inputs["input_ids"] == vlm.inner.config.image_token_id).sum())
            self.projected = torch.arange(placeholders, device=inputs["input_ids"].device) % n < kept
        elif before:
            assert vlm.tower is not None
            end = str(len(vlm.tower.blocks))  # the last block whose output is used
            cuts = [replace(row, layer=end) if row.layer == OUT else row for row in before]
            self.tower = detached_handle(vlm.inner.vision_tower, _first_tokens(handle, cuts))
            self.inputs = self._shorten(inputs, before[0].tokens_in, before[-1].tokens_out)
        self._stack = ExitStack()

    @staticmethod
    def refusal(vlm: Vlm, handle: Handle, inputs: Mapping[str, Tensor]) -> str | None:
        """Why there is no oracle for a plan; None: there is one."""
        mask = inputs.get("attention_mask")
        counts = (inputs["input_ids"] == vlm.inner.config.image_token_id).sum(1)  # (B,)
        if vlm.decoder.implementation != "sdpa":
            return f"the masks of {vlm.decoder.implementation} attention have the length of the prompt"
        if mask is not None and not bool(mask.all()):
            return "the prompts have padding"
        if bool((counts != counts[0]).any()):
            return "the prompts have different numbers of vision tokens"
        if vlm.images is not None and handle.plan.image_step is not None:
            return f"{vlm.family} gets smaller images"
        before = _before_decoder(handle)
        if before and vlm.out_is_projected:
            if any(row.layer != OUT for row in before):
                return "tiles of images, or squares of their patches, are cut in the tower"
            if any(isinstance(row, UnevenRow) and row.least_out != row.tokens_out for row in before):
                return "images are left with different numbers of tokens"
            if _tokens_of_image(vlm, inputs) == 0:
                return "the images have different numbers of tokens"
        return None

    def _shorten(self, inputs: Mapping[str, Tensor], n: int, kept: int) -> dict[str, Tensor]:
        """Prompts with `kept` placeholders for each image, instead of n."""
        ids = inputs["input_ids"]
        placeholders = ids == self.vlm.inner.config.image_token_id  # (B, L)
        stays = ~placeholders | ((placeholders.cumsum(1) - 1) % n < kept)
        short = {name: value[stays].view(len(ids), -1) if value.shape == ids.shape else value for name, value in inputs.items()}
        if GRIDS in inputs:  # from which a Qwen-VL numbers the placeholders
            merge = self.vlm.inner.config.vision_config.spatial_merge_size
            short[GRIDS] = torch.tensor([[1, merge, merge * kept]] * len(inputs[GRIDS]), device=ids.device)
        return short

    def _hand_over(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The image features of the stock model for the whole images, without the tokens that are not handed over."""
        assert self.projected is not None
        named = name_arguments(self.vlm.inner.get_image_features, args, kwargs)
        out = stock(**named | {name: self.whole[name] for name in (GRIDS,) if name in self.whole})
        out = copy.copy(out)  # somebody may hold it
        out.pooler_output = _select(out.pooler_output, self.projected)
        if getattr(out, "deepstack_features", None) is not None:
            out.deepstack_features = [_select(layer, self.projected) for layer in out.deepstack_features]
        return out

    def __enter__(self) -> StockOracle:
        if self.tower is not None:
            self._stack.enter_context(self.tower)
        if self.projected is not None:
            self._stack.callback(replace_method(self.vlm.inner, "get_image_features", self._hand_over))
        whole = self.inputs["input_ids"].shape[1]
        decoder = self.vlm.decoder
        for layer, length in zip(decoder.layers, self.lengths, strict=True):
            if length < whole:
                self._hook(layer, _shortener(length))
        if hasattr(decoder.module, "_deepstack_process"):
            self._stack.callback(
                replace_method(decoder.module, "_deepstack_process", lambda add, *args: add(*_at_the_end(*args)))
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _hook(self, module: nn.Module, change: Callable[..., Any]) -> None:
        """Changes the arguments of the next call of a module. Later calls, those of decode steps, are untouched."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            handle.remove()
            return change(args, kwargs)

        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        self._stack.callback(handle.remove)


def _shortener(length: int) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of a decoder layer for the last tokens of what it got."""

    def change(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def end(x: Tensor, dim: int) -> Tensor:
            return x.narrow(dim, x.shape[dim] - length, length)

        changed: dict[str, Any] = {"position_embeddings": tuple(end(table, 1) for table in kwargs["position_embeddings"])}
        if (mask := kwargs.get("attention_mask")) is not None:  # (B, 1, L, L), of images that are seen in both directions
            changed["attention_mask"] = end(end(mask, 2), 3)
        return (end(args[0], 1), *args[1:]), kwargs | changed

    return change


def _at_the_end(states: Tensor, mask: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of Qwen3-VL's addition of deep features, for the last tokens alone. states: (B, K, D), mask: (B, L)."""
    if states.shape[1] == mask.shape[1]:
        return states, mask, features
    mask = mask[:, mask.shape[1] - states.shape[1] :]
    return states, mask, features[: int(mask.sum())]
