"""Towers that encode an image to one feature: open_clip, Hugging Face, timm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokensieve import embedded
from tokensieve.data.images import open_photo
from tokensieve.data.source import Inputs
from tokensieve.embedded.datasets import EmbeddedScenes
from tokensieve.models.features import encode_image
from tokensieve.tasks.fidelity.measures import cosine_distance
from tokensieve.tuning.images import ImageSet, draw_numbers, find_images, read_again
from tokensieve.tuning.subject import Subject


class ImageFeatures(Subject):
    """The cosine of image features."""

    def shipped(self) -> ImageSet | None:
        if self.request.model not in embedded.MODELS:
            return None
        self.scenes = EmbeddedScenes("val")
        return draw_numbers("embedded scenes (val)", len(self.scenes), self.request)

    def find_files(self) -> ImageSet:
        return find_images(self.request)

    def batch(self, start: int, stop: int) -> Inputs:
        items = self.images.items[start:stop]
        images = [self.scenes[item][0] if isinstance(item, int) else read_again(item, open_photo) for item in items]
        return torch.stack([self.loaded.transform(image) for image in images])

    def run(self, model: Any, inputs: Inputs) -> Tensor:
        assert isinstance(inputs, Tensor)
        return encode_image(model, inputs)

    def compare(self, full: Tensor, reduced: Tensor) -> dict[str, Tensor]:
        return {"distance": cosine_distance(full, reduced)}
