"""The processors of vLLM's models under a plan: prompts get as many image tokens as stay.

Each image goes to the model with five numbers: its grid (h, w) of tokens before the cut, a hash of its pixels and grid in two
parts, and how many of the tokens are line ends, which stay.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import PromptUpdate

from tokensieve.errors import UserError
from tokensieve.serving.engine_config import plan_of
from tokensieve.serving.positions import span
from tokensieve.serving.served_plan import ServedPlan

FIELD = "tokensieve_image"  # of the data of an image: (h, w, hash, hash, line ends)
N_NUMBERS = 5
HALF = 31  # bits of each part of a hash
REMEMBERED = 1 << 16  # grids of images
_PARTS = ("mm_hashes", "mm_kwargs", "mm_placeholders")  # of what a processor makes of a prompt


def image_row(pixels: Tensor, grid: tuple[int, int], line_ends: int = 0) -> Tensor:
    """What the model is told about an image, (5,)."""
    data = pixels.detach().cpu().contiguous().view(torch.uint8).numpy().data
    made = hashlib.blake2b(data, digest_size=8)
    made.update(repr((*grid, line_ends)).encode())  # the same pixels may be an image of 4 x 6 tokens and one of 6 x 4
    digest, mask = int.from_bytes(made.digest(), "big"), (1 << HALF) - 1
    return torch.tensor([*grid, digest >> 33 & mask, digest & mask, line_ends])


def read_hash(row: Sequence[int]) -> int:
    """The hash of an image."""
    return (row[2] << HALF) | row[3]


def plan_for(config: Any) -> ServedPlan:
    """The plan of a model that has one."""
    plan = plan_of(config)
    if plan is None:
        raise RuntimeError("the model has no plan")
    return plan


def kept(plan: ServedPlan, n: int) -> int:
    """The number of tokens that an image of n tokens keeps; a ValueError, which vLLM reports, if that is none."""
    try:
        return plan.kept(n)
    except UserError as error:
        raise ValueError(f"tokensieve: {error}") from None


class PlanInfo:
    """Mixed into vLLM's ProcessingInfo of a family."""

    @functools.cached_property
    def plan(self: Any) -> ServedPlan:
        """The plan of the model."""
        return plan_for(self.get_hf_config())

    @property
    def model_id(self: Any) -> str:
        """Goes into the hash of images, and so into the key of every cache of them."""
        return f"{super().model_id}|{self.plan.identity}"  # type: ignore[misc]

    def get_supported_mm_limits(self: Any) -> Mapping[str, int | None]:
        limits = super().get_supported_mm_limits()  # type: ignore[misc]
        return {modality: limit if modality == "image" else 0 for modality, limit in limits.items()}


class PlanProcessor:
    """Mixed into vLLM's processor of a family."""

    info: Any
    _is_measuring = False

    @functools.cached_property
    def plan(self) -> ServedPlan:
        """The plan of the model."""
        return plan_for(self.info.get_hf_config())

    @functools.cached_property
    def _grids(self) -> OrderedDict[str, tuple[int, int]]:
        """The grids of images by their hash: vLLM keeps no data of images that it has sent to the model before."""
        return OrderedDict()

    def grids(self, processed: Mapping[str, Any]) -> list[tuple[int, int]]:
        """The grid of tokens of each image, (h, w), from what the processor of Hugging Face made."""
        raise NotImplementedError

    def line_ends(self, processed: Mapping[str, Any]) -> Sequence[int]:
        """How many tokens of each image end a line of it; the grid counts them too."""
        return [0] * len(self.grids(processed))

    def pixels(self, processed: Mapping[str, Any]) -> Sequence[Tensor]:
        """The pixels of each image."""
        return list(processed["pixel_values"])

    def _postprocess_hf_mm_data(self, *args: Any, **kwargs: Any) -> Any:
        processed = super()._postprocess_hf_mm_data(*args, **kwargs)  # type: ignore[misc]
        if processed.get("pixel_values") is not None:
            told = self.pixels(processed), self.grids(processed), self.line_ends(processed)
            rows = [image_row(*each) for each in zip(*told, strict=True)]
            processed[FIELD] = torch.stack(rows)
        return processed

    def _get_mm_fields_config(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        fields = super()._get_mm_fields_config(*args, **kwargs)  # type: ignore[misc]
        return {**fields, FIELD: MultiModalFieldConfig.batched("image", keep_on_cpu=True)}

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Sequence[PromptUpdate]:
        stock = super()._get_prompt_updates(  # type: ignore[misc]
            mm_items=mm_items, hf_processor_mm_kwargs=hf_processor_mm_kwargs, out_mm_kwargs=out_mm_kwargs
        )
        return [self._fewer(each, out_mm_kwargs) if each.modality == "image" else each for each in stock]

    def _fewer(self, update: Any, out_mm_kwargs: Any) -> Any:
        """The update of a prompt with as many image tokens as stay."""
        plan, stock = self.plan, update.replacement

        def replacement(item: int) -> list[int]:
            ids = stock(item)
            h, w, *_, line_ends = out_mm_kwargs["image"][item][FIELD].data.tolist()
            if len(ids) != h * w:
                raise RuntimeError(f"{len(ids)} placeholders for an image of {h} x {w} tokens")
            return list(ids[: kept(plan, h * w - line_ends) + line_ends])

        return dataclasses.replace(update, replacement=replacement)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        made = super().apply(*args, **kwargs)  # type: ignore[misc]
        if not self.plan.compact and not self._is_measuring:
            self._check_positions(made)
        return made

    def get_dummy_mm_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Images without text, by which vLLM measures memory when it starts: no request, so nothing is checked."""
        self._is_measuring = True
        try:
            return super().get_dummy_mm_inputs(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._is_measuring = False

    def _check_positions(self, made: Any) -> None:
        """A ValueError, with which vLLM answers the request, if positions of the uncut prompt cannot be given to its tokens.

        Of the prompt alone: tokens that are generated may go beyond max_position_embeddings.
        """
        largest = self.info.get_hf_config().get_text_config().max_position_embeddings
        needed = length = len(made["prompt_token_ids"])
        for name, item, place in zip(*(made[of].get("image", []) for of in _PARTS), strict=True):
            if place.offset + place.length == length:
                raise ValueError("tokensieve: the prompt ends with an image; put some text behind it")
            grid = self._grid(name, item)
            needed += 0 if grid is None else span(grid, self.plan.has_grid_positions) - place.length
        if needed > largest:
            raise ValueError(
                f"tokensieve: the prompt takes {needed} positions before its images are cut, and the model has {largest}; send "
                "fewer images or less text, or start the server with tokensieve_positions=compact"
            )

    def _grid(self, name: str, item: Any) -> tuple[int, int] | None:
        """The grid of an image."""
        if item is not None:
            h, w = item[FIELD].data.tolist()[:2]
            self._grids[name] = (h, w)
            if len(self._grids) > REMEMBERED:
                self._grids.popitem(last=False)
        return self._grids.get(name)
