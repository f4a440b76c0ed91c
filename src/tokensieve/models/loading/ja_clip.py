"""TODO docstring."""

from __future__ import annotations

import torch

from tokensieve.errors import UserError
from tokensieve.models.loading.fingerprints import identity
from tokensieve.models.loading.loaded import Loaded


def load_ja_clip(pretrained: str, cache_dir: str | None, device: torch.device | str) -> Loaded:
    from clip_benchmark.models.japanese_clip import load_japanese_clip

    try:
        model, transform, tokenizer = load_japanese_clip(pretrained=pretrained, device=device, cache_dir=cache_dir)
    except ImportError as error:
        raise UserError(f"--model_type ja_clip: {error}") from error
    model.model.eval()
    return Loaded(model, transform, tokenizer, identity(model.model, transform))
