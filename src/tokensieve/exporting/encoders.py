"""What is exported: a module from images to what a user takes from the tower, with the plan attached to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.cutting.handle import Handle
from tokensieve.errors import Uncuttable, UserError
from tokensieve.models.features import encode_image
from tokensieve.models.vlm import Vlm


class ImageEncoder(nn.Module):
    """The image feature of a model, as `encode_image` gives it: (B, 3, h, w) -> (B, E)."""

    outputs = ("features",)

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return encode_image(self.model, images)


class ImageTokens(nn.Module):
    """What the language model of a LLaVA reads of an image: tower and projector.

    (B, 3, h, w) -> the tokens (B, K, E), and the patches that they stand for (B, K), as raster indices.
    """

    outputs = ("tokens", "positions")

    def __init__(self, vlm: Vlm, handle: Handle) -> None:
        super().__init__()
        if vlm.tower is None or not hasattr(vlm.inner, "multi_modal_projector"):
            raise Uncuttable(f"{vlm.family}: {vlm.reason or 'its projector is not a module of its own'}; it cannot be exported")
        self.vision_tower: Any = vlm.inner.vision_tower
        self.projector: Any = vlm.inner.multi_modal_projector
        self.prefix, self.layer = vlm.tower.prefix, vlm.inner.config.vision_feature_layer
        self._handle = handle

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        states = self.vision_tower(images, output_hidden_states=True, return_dict=True).hidden_states[self.layer]
        tokens: Tensor = self.projector(states[:, self.prefix :])
        positions = self._handle.kept
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
        return tokens, positions


def image_encoder(model: nn.Module, vlm: Vlm | None, handle: Handle) -> ImageEncoder | ImageTokens:
    """The module to export; a UserError if the model makes no features of images alone."""
    if vlm is not None:
        return ImageTokens(vlm, handle)
    try:
        return ImageEncoder(model)
    except Uncuttable as error:
        raise UserError(str(error)) from error
