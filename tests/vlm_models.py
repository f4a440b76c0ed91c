"""Tiny vision-language models with random weights, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IMAGE, PAD = 63, 0  # ids
DECODERS = ("llama", "qwen2", "mistral", "qwen3")
GRID = 6  # patches a side


def llava(decoder: str = "llama", implementation: str = "sdpa", layer: int = -2, seed: int = 0) -> Any:
    """A LLaVA with a CLIP tower of 36 patches and a decoder of 6 layers."""
    from transformers import (
        AutoConfig,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    text = AutoConfig.for_model(
        decoder,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
    )
    vision = CLIPVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=24, patch_size=4
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        image_seq_length=GRID**2,
        vision_feature_layer=layer,
    )
    config._attn_implementation = implementation
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():  # larger than usual, so that attention has something to say
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.generation_config.eos_token_id = None
    return model


def prompts(images: tuple[int, ...] = (1, 1), words: tuple[int, ...] = (5, 5), seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts, each with so many images and so many words after them."""
    made = torch.Generator().manual_seed(seed)
    rows = []
    for count, asked in zip(images, words, strict=True):
        ids = [torch.tensor([1, 7])]
        for _ in range(count):
            ids += [torch.full((GRID**2,), IMAGE), torch.tensor([9])]
        ids.append(torch.randint(10, 60, (asked,), generator=made))
        rows.append(torch.cat(ids))
    length = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_full((length - len(row),), PAD), row]) for row in rows])
    pixels = torch.randn(sum(images), 3, 24, 24, generator=made)
    mask = torch.stack([(torch.arange(length) >= length - len(row)).long() for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}


def single(batch: dict[str, Tensor], row: int, first: int, images: int = 1) -> dict[str, Tensor]:
    """One prompt of a batch on its own, without padding."""
    real = batch["attention_mask"][row].bool()
    return {
        "input_ids": batch["input_ids"][row][real][None],
        "attention_mask": batch["attention_mask"][row][real][None],
        "pixel_values": batch["pixel_values"][first : first + images],
    }
