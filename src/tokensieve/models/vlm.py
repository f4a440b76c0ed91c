"""Vision-language models of Hugging Face, opened: vision tower, projector, and the decoder that reads image and text as one.

LLaVA can be cut everywhere: in its tower, at the tower's output (before the projector), and in the decoder. Of models that
rearrange tokens between tower and decoder (tiles with line ends, merged squares of patches) the decoder alone can be cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tokensieve.errors import Uncuttable
from tokensieve.models import hf
from tokensieve.models.decoder import Decoder, open_decoder
from tokensieve.models.families import VLM_FAMILIES, VlmFamily
from tokensieve.models.image_grid import TokenGrids
from tokensieve.models.qwen_vl import QwenImages
from tokensieve.models.tower import Tower
from tokensieve.registry import resolve


@dataclass
class Vlm:
    """A model that reads images and text with one decoder."""

    family: str
    model: Any  # what the user holds; generates, unless it is the bare inner model
    inner: Any  # what puts the features of images into the sequence
    decoder: Decoder
    tower: Tower | None  # None: it cannot be cut
    reason: str = ""  # why not
    images: QwenImages | None = None  # how it takes images of any size; None: they are those of the tower, or of tiles
    grids: TokenGrids | None = None  # where tokens lie in their images; None: as in the tower
    no_resize_reason: str = ""  # why images cannot be made smaller, where there is neither a tower nor `images`


def open_vlm(model: nn.Module) -> Vlm | None:
    """The parts of a vision-language model; None if it is none that is known; Uncuttable if its decoder cannot be cut."""
    folders = [_folder(base) for base in type(model).__mro__]
    family = next((VLM_FAMILIES[name] for name in folders if name in VLM_FAMILIES), None)
    if family is None:
        return None
    name = type(model).__name__
    inner: Any = getattr(model, "model", model)
    if not hasattr(inner, "language_model") or not hasattr(inner, "get_placeholder_mask"):
        if family.opens_tower or hasattr(inner, "visual"):
            raise Uncuttable(f"{name} is not laid out as in transformers 5; install transformers>=5")
        return None  # a tower or a decoder of its own
    decoder = open_decoder(inner.language_model, name)
    grids: TokenGrids | None = resolve(family.grids) if family.grids else None
    try:
        return Vlm(family.title, model, inner, decoder, _tower(inner, family))
    except Uncuttable as error:
        if family.images:
            return Vlm(family.title, model, inner, decoder, None, error.reason, resolve(family.images)(inner), grids)
        tiles = "its processor cuts images into tiles before the model sees them; give it smaller images"
        no_resize = error.reason if family.opens_tower else tiles
        return Vlm(family.title, model, inner, decoder, None, error.reason, grids=grids, no_resize_reason=no_resize)


def open_tower(model: nn.Module) -> Tower | None:
    """The vision tower of a vision-language model; None if it is none that is known."""
    vlm = open_vlm(model)
    if vlm is not None and vlm.tower is None:
        raise Uncuttable(f"{type(model).__name__}: {vlm.reason}")
    return None if vlm is None else vlm.tower


def _folder(base: type) -> str:
    parts = base.__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else ""


def _tower(inner: Any, family: VlmFamily) -> Tower:
    """LLaVA's tower up to the layer whose tokens it takes."""
    if not family.opens_tower:
        raise Uncuttable(
            f"{family.title} rearranges its tokens between tower and decoder, so only the decoder can be cut; use @llm.0"
        )
    config = inner.config
    tower = hf.open_tower(inner.vision_tower)
    if tower is None:
        raise Uncuttable(
            f"its vision tower, a {type(inner.vision_tower).__name__}, is of no family that can be cut; use @llm.0"
        )
    layer = config.vision_feature_layer
    if not isinstance(layer, int):
        raise Uncuttable(f"it joins the tokens of several layers ({layer}), which would have to be cut alike; use @llm.0")
    if config.vision_feature_select_strategy == "full" and tower.prefix:
        raise Uncuttable('it shows CLS to the decoder (vision_feature_select_strategy="full"); use @llm.0')
    used = layer if layer >= 0 else tower.depth + 1 + layer
    if used < 1:
        raise Uncuttable(f"it takes the tokens before the first block (vision_feature_layer={layer}); use @llm.0")
    return replace(
        tower,
        family=f"{tower.family} in LLaVA",
        blocks=tower.blocks[:used],
        pools_cls=False,
        patch_pooling=lambda _: [],
        entries=[replace(entry, kind="part") for entry in tower.entries],
    )
