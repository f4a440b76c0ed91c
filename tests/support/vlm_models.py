"""Tiny vision-language models with random weights, and prompts for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokensieve.testing.tiny_vlms import DECODERS, GRID, IMAGE, PAD, llava, prompts, relative

__all__ = ["DECODERS", "GRID", "IMAGE", "PAD", "in_float64", "llava", "prompts", "relative", "single"]


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
