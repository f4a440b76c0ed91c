"""Positions of image tokens in vLLM, as if nothing had been cut.

vLLM asks a model for positions when a request arrives, before the image is encoded: then all that is known is where the image
starts and how many positions it takes. Which tokens stay is known behind the encoder. So each token carries its offset in the
image in four more columns of its embedding, and `fill_positions` writes it when vLLM is about to run the tokens.

Positions have three rows (mRoPE). The first row of an image's tokens is always the start of the image, so the same tokens
can be written any number of times: in a later chunk of the prompt, or after the request was preempted. A language model with
one row of positions (LLaVA) takes them from the second row: `line_sections`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

N_COLUMNS = 4  # of an embedding, for its offsets
BASE = 128  # an offset is two numbers below BASE ** 2, which are exact in bfloat16


def span(grid: tuple[int, int], has_grid_positions: bool) -> int:
    """How many positions an uncut image takes."""
    h, w = grid
    return max(h, w) if has_grid_positions else h * w


def offset_columns(index: Tensor, width: int, has_grid_positions: bool) -> Tensor:
    """The offsets of the tokens at raster index (B, K) in an image of that width, as columns: (B, K, 4)."""
    offsets = (index // width, index % width) if has_grid_positions else (index, index)
    return torch.stack([part for each in offsets for part in (each // BASE, each % BASE)], dim=-1)


def read_offsets(columns: Tensor) -> Tensor:
    """The offsets of tokens, (2, K), from their columns (K, 4)."""
    high, low = columns[:, 0::2].long(), columns[:, 1::2].long()
    return (high * BASE + low).T


def first_positions(length: int, images: Sequence[tuple[int, int, int]]) -> tuple[Tensor, int]:
    """Positions (3, L) of a prompt before its images are encoded, and what is added to the positions behind it.

    images: (offset, tokens that stay, positions of the uncut image) for each, in order.
    """
    parts, at, position = [], 0, 0
    for offset, kept, taken in images:
        parts.append(torch.arange(position, position + offset - at))
        position += offset - at
        parts.append(torch.full((kept,), position))
        position, at = position + taken, offset + kept
    parts.append(torch.arange(position, position + length - at))
    position += length - at
    return torch.cat(parts).expand(3, -1).clone(), position - length


def fill_positions(positions: Tensor, is_image: Tensor, columns: Tensor, first: int) -> Tensor:
    """Positions (3, L) with those of the image tokens that vLLM is about to run.

    is_image: (L,), the places of image tokens. columns: (K, 4), of the next K of them from `first` on.
    """
    at = is_image.nonzero()[:, 0]
    at = at[at >= first][: len(columns)]
    filled = positions.clone()
    filled[1:, at] = positions[:1, at] + read_offsets(columns.to(positions.device))
    return filled


def line_sections(text_config: Mapping[str, Any]) -> list[int]:
    """The sections of mRoPE that make it plain RoPE over the second row of positions."""
    size = text_config.get("head_dim") or text_config["hidden_size"] // text_config["num_attention_heads"]
    share = (text_config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    return [0, int(size * share) // 2, 0]
