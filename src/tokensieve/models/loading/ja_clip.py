"""Japanese CLIP models of clip_benchmark: --pretrained is the name of the model."""

from __future__ import annotations

import torch

from tokensieve.errors import UserError
from tokensieve.models.loading.fingerprints import identity
from tokensieve.models.loading.loaded import Loaded


def check_model(model: str, pretrained: str) -> None:
    """A UserError if no model is named."""
    if not pretrained:
        raise UserError("--model_type ja_clip needs --pretrained, for example --pretrained rinna/japanese-clip-vit-b-16")


def load(
    model: str,
    pretrained: str,
    *,
    cache_dir: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """The model with its transform and its tokenizer."""
    from clip_benchmark.models.japanese_clip import load_japanese_clip

    check_model(model, pretrained)
    try:
        built, transform, tokenizer = load_japanese_clip(pretrained=pretrained, device=device, cache_dir=cache_dir)
    except ImportError as error:
        raise UserError(f"--model_type ja_clip: {error}") from error
    built.model.to(dtype=dtype).eval()
    return Loaded(built, transform, tokenizer, identity(built.model, transform))
