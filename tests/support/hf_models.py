"""Tiny Hugging Face models with random weights, saved as folders with their processor and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 48,
    "patch_size": 8,
}
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
START, END = "<|startoftext|>", "<|endoftext|>"


def build(kind: str) -> Any:
    """A model of this kind: clip, siglip, siglip2, dinov2, dinov3 or vit."""
    import transformers as t

    torch.manual_seed(0)
    text = TEXT | {"vocab_size": 54, "max_position_embeddings": 16, "bos_token_id": 52, "eos_token_id": 53, "pad_token_id": 53}
    patches = {"num_patches": 36}
    make = {
        "clip": lambda: t.CLIPModel(t.CLIPConfig(vision_config=VISION, text_config=text, projection_dim=24)),
        "siglip": lambda: t.SiglipModel(t.SiglipConfig(vision_config=VISION, text_config=text)),
        "siglip2": lambda: t.Siglip2Model(t.Siglip2Config(vision_config=VISION | patches, text_config=text)),
        "dinov2": lambda: t.Dinov2Model(t.Dinov2Config(**VISION)),
        "dinov3": lambda: t.DINOv3ViTModel(t.DINOv3ViTConfig(**VISION, num_register_tokens=2)),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**VISION)),  # as most are published: no pooler
    }
    model = make[kind]().eval()
    with torch.no_grad():  # as initialised, it would see all images alike
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def save(kind: str, folder: Path) -> str:
    """The model in a folder, as Hugging Face publishes it."""
    import transformers as t

    build(kind).save_pretrained(folder)
    square = {"height": 48, "width": 48}
    processor = {
        "clip": lambda: t.CLIPImageProcessor(size={"shortest_edge": 48}, crop_size=square),
        "siglip": lambda: t.SiglipImageProcessor(size=square),
        "siglip2": lambda: t.Siglip2ImageProcessor(patch_size=8, max_num_patches=36),
        "dinov2": lambda: t.BitImageProcessor(size={"shortest_edge": 56}, crop_size=square),
        "dinov3": lambda: t.DINOv3ViTImageProcessor(size=square),
        "vit": lambda: t.ViTImageProcessor(size=square),
    }[kind]()
    processor.save_pretrained(folder)
    if kind in ("clip", "siglip", "siglip2"):
        tokenizer().save_pretrained(folder)
    return str(folder)


def tokenizer() -> Any:
    """CLIP's tokenizer with letters for a vocabulary: each letter alone or at the end of a word, no merges."""
    from transformers import CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(f"{letter}</w>" for letter in letters), START, END]
    return CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=16)
