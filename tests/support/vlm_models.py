"""Tiny vision-language models with random weights, and prompts for them."""

from __future__ import annotations

from torch import Tensor

from tokensieve.testing.tiny_vlms import DECODERS, GRID, IMAGE, PAD, llava, prompts, relative

__all__ = ["DECODERS", "GRID", "IMAGE", "PAD", "llava", "prompts", "relative", "single"]


def single(batch: dict[str, Tensor], row: int, first: int, images: int = 1) -> dict[str, Tensor]:
    """One prompt of a batch on its own, without padding."""
    real = batch["attention_mask"][row].bool()
    return {
        "input_ids": batch["input_ids"][row][real][None],
        "attention_mask": batch["attention_mask"][row][real][None],
        "pixel_values": batch["pixel_values"][first : first + images],
    }
