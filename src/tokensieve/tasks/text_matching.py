"""What retrieval and selection share: images and captions as unit vectors, whose products are their similarities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.errors import UserError
from tokensieve.models.features import encode_text
from tokensieve.tasks.base import Encode, TaskContext, check_finite


def one_image_each(images: Tensor, task: str) -> Tensor:
    """The images (B,3,h,w) as they are; a UserError if samples have several."""
    if images.dim() == 5:
        raise UserError(
            f"--task {task} needs one image a sample; this data has {images.shape[1]}. Use --task image_caption_selection."
        )
    return images


def images_to_unit(context: TaskContext, encode: Encode, images: Tensor) -> Tensor:
    """(B,3,h,w) -> (B,E) on the CPU, float32, of length 1, under one plan."""
    with torch.inference_mode(), context.precision():
        return check_finite(F.normalize(encode(images), dim=-1).float().cpu())


def texts_to_unit(context: TaskContext, texts: Sequence[str]) -> Tensor:
    """T captions -> (T,E) on the CPU, float32, of length 1."""
    with torch.inference_mode(), context.precision():
        tokens = context.loaded.tokenizer(list(texts)).to(context.device)
        return check_finite(F.normalize(encode_text(context.loaded.model, tokens), dim=-1).float().cpu())
