"""TODO docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from tokensieve.errors import Uncuttable
from tokensieve.models.tower import Tower

if TYPE_CHECKING:
    from tokensieve.models.vlm import Vlm


KNOWN = (
    "open_clip models with a VisionTransformer or a timm tower (CLIP, CoCa, SigLIP, EVA02); timm VisionTransformers (DeiT, "
    "DINOv2, ...) and Eva; Hugging Face CLIP, SigLIP, SigLIP2, ViT, DeiT, DINOv2 and DINOv3"
)


def open_tower(model: nn.Module) -> Tower:
    """The vision tower of a model of any known family; Uncuttable, with the reason, where there is none."""
    from tokensieve.models import hf, open_clip, timm
    from tokensieve.reid import build

    vlm = open_vlm(model)
    if vlm is not None:
        if vlm.tower is None:
            raise Uncuttable(f"{type(model).__name__}: {vlm.reason}")
        return vlm.tower
    for family in (build, open_clip, timm, hf):
        tower = family.open_tower(model)
        if tower is not None:
            return tower
    raise Uncuttable(f"{type(model).__name__} is of no family that can be cut; known are {KNOWN}")


def open_vlm(model: nn.Module) -> Vlm | None:
    """The parts of a vision-language model; None if it is none that is known."""
    from tokensieve.models import vlm

    return vlm.open_vlm(model)
