"""The image tokens and the text in one space, for methods that compare them.

With a text tower: its embeddings of the question and the tokens in their space (CLIP). In a language model without one: the
input embeddings of the question and the vision tokens as the model reads them, as OpenVINO's CDPruner does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokensieve.core import View
from tokensieve.errors import UserError


@dataclass
class TextSpace:
    """Both sides of a comparison, in float32."""

    image: Tensor  # (B, N, E)
    text: Tensor  # (B, M, E), segments or words
    mask: Tensor  # (B, M), False: padding
    is_clip: bool  # from a text tower: there, patches that match the text have the LOWER cosine

    def mean_text(self) -> Tensor:
        """The mean of the text's embeddings, (B, E)."""
        mask = self.mask[..., None].float()
        return (self.text * mask).sum(1) / mask.sum(1).clamp_min(1)


def text_space(view: View, name: str) -> TextSpace:
    """The space of `view.text`, or that of the language model; a UserError for the method `name` where there is neither."""
    image = view.tokens if view.image_embeds is None else view.image_embeds
    if view.text is not None:
        text, mask, is_clip = view.text, torch.ones(view.text.shape[:2], dtype=torch.bool, device=view.text.device), True
    elif view.question is not None:
        image, text, mask, is_clip = view.tokens, view.question.tokens, view.question.mask, False
    else:
        raise UserError(f"{name} compares image tokens with text, and there is none; it can stand at @llm.0")
    if image.shape[-1] != text.shape[-1]:
        raise UserError(
            f"{name}: the text has the width {text.shape[-1]}, the tokens {image.shape[-1]}; give image_embeds in its space"
        )
    return TextSpace(image.float(), text.float(), mask, is_clip)
