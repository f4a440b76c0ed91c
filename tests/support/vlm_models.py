"""Tiny vision-language models with random weights, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokensieve.testing.tiny_vlms import DECODERS, GRID, IMAGE, PAD, llava, prompts, relative

__all__ = ["DECODERS", "GRID", "IMAGE", "PAD", "VARYING", "in_float64", "llava", "prompts", "relative", "rows_of", "single"]

# families of `relative` with one image in each prompt, and different numbers of tokens
VARYING = ("llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def in_float64(model: Any, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Both in double, for what is computed in two ways: in float32 near ties of scores or words may fall either way."""
    return model.double(), {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def single(batch: dict[str, Tensor], row: int, first: int, images: int = 1) -> dict[str, Tensor]:
    """One prompt of a batch on its own, without padding."""
    real = batch["attention_mask"][row].bool()
    return {
        "input_ids": batch["input_ids"][row][real][None],
        "attention_mask": batch["attention_mask"][row][real][None],
        "pixel_values": batch["pixel_values"][first : first + images],
    }


def rows_of(batch: dict[str, Tensor], rows: list[list[int]], words: tuple[int, ...] = (2, 5, 3)) -> dict[str, Tensor]:
    """Left-padded prompts with these images of a batch of `relative`, by number, and so many words behind the images."""
    counts = (batch["input_ids"] == IMAGE).sum(1).tolist()
    texts = []
    for row, n_words in zip(rows, words, strict=False):
        parts = [torch.tensor([1, 7])]
        for image in row:
            parts += [torch.full((counts[image],), IMAGE), torch.tensor([9])]
        texts.append(torch.cat([*parts, torch.arange(20, 20 + n_words)]))
    length = max(map(len, texts))
    ids = torch.stack([torch.cat([text.new_full((length - len(text),), PAD), text]) for text in texts])
    order = [image for row in rows for image in row]
    made = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    if "image_grid_thw" in batch:
        patches = batch["pixel_values"].split(batch["image_grid_thw"].prod(1).tolist())
        made["pixel_values"] = torch.cat([patches[image] for image in order])
        made["image_grid_thw"] = batch["image_grid_thw"][order]
        made["mm_token_type_ids"] = (ids == IMAGE).int()
    else:
        made |= {name: batch[name][order] for name in ("pixel_values", "image_sizes")}
    return made
