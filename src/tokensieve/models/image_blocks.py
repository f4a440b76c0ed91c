"""Tokens of a prompt that see each other in both directions: those of an image, or all of a prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tokensieve.errors import UserError

# (arguments of the model that puts features into the sequence, L) -> (B, L): for each new token the number of its block, or
# -1 where it sees only those before it; None: all do
ImageBlocks = Callable[[Mapping[str, Any], int], Tensor | None]


def image_runs(arguments: Mapping[str, Any], length: int) -> Tensor | None:
    """One block for each run of image tokens (Gemma 3)."""
    types = _token_types(arguments, length)
    if types is None:
        return None
    is_image = types == 1
    starts = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    return torch.where(is_image, starts.int().cumsum(1) - 1, -1)


def prefix(arguments: Mapping[str, Any], length: int) -> Tensor | None:
    """One block for images and question, before the answer (PaliGemma). In later passes there is none."""
    cache = arguments.get("past_key_values")
    goes_on = cache is not None and cache.is_initialized and arguments.get("pixel_values") is None
    if goes_on:
        return None
    types = _token_types(arguments, length)
    if types is None:
        raise UserError("token_type_ids are missing, which tell the question from the answer; pass what the processor returns")
    return torch.where(types == 0, 0, -1)


def _token_types(arguments: Mapping[str, Any], length: int) -> Tensor | None:
    """token_type_ids of the new tokens, (B, L); they may also tell those of earlier ones."""
    types = arguments.get("token_type_ids")
    return None if types is None else types[:, -length:]
