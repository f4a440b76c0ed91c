"""What loading a model gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tokensieve.errors import UserError


@dataclass
class Loaded:
    """A model in evaluation mode with what belongs to it."""

    model: Any
    transform: Callable[[Any], torch.Tensor]
    tokenizer: Callable[[list[str]], Any]
    fingerprint: str  # identity()
    notes: list[str] = field(default_factory=list)


def no_text(model: str) -> Callable[[list[str]], Any]:
    """The tokenizer of a model without a text tower."""

    def refuse(texts: list[str]) -> Any:
        raise UserError(f"{model} has no text tower, so it cannot compare images with texts; use --task linear_probe")

    return refuse
