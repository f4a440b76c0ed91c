"""Vision-language models of Hugging Face, opened: vision tower, projector, and the decoder that reads image and text as one.

LLaVA can be cut everywhere: in its tower, at the tower's output (before the projector), and in the decoder. Models that
rearrange tokens between tower and decoder (tiles with line ends, merged squares of patches) are cut behind the projector, at
what it hands to the decoder, and in the decoder. Where a tower sees tiles, it is cut too, and what it removed is put back as
zeros before the tiles are packed. A tower that merges squares of patches at its end (Qwen-VL) is cut by whole squares.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from tokensieve.errors import Uncuttable
from tokensieve.models import hf
from tokensieve.models.decoder import Decoder, open_decoder
from tokensieve.models.families import VLM_FAMILIES, VlmFamily
from tokensieve.models.image_blocks import ImageBlocks
from tokensieve.models.image_grid import IMAGE, VIDEO, TokenLayouts
from tokensieve.models.packed_tower import PackedTower
from tokensieve.models.qwen_vl import QwenImages
from tokensieve.models.tower import Tower
from tokensieve.registry import resolve

SIZED_TOWERS = ("pixtral",)  # model types of towers that take images of any size, in families whose other towers can be cut
NO_SIZED_TOWER = "its tower joins images to one sequence with a mask for all patches; that these follow a cut is not built"


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
    layouts: dict[str, TokenLayouts] = field(default_factory=dict)  # by medium: its tokens; none: those of the tower
    tile_tower: Tower | None = None  # sees the tiles of images
    packed_tower: PackedTower | None = None  # its batch is one sequence of patches
    no_resize_reason: str = ""  # why images cannot be made smaller, where there is neither a tower nor `images`
    merger: str = "get_placeholder_mask"  # the method of `inner` that gets input_ids, inputs_embeds and the image features
    blocks: ImageBlocks | None = None  # tokens that see each other in both directions; None: there are none
    blocks_pass_window: bool = False  # in layers with a window: also where they are further apart

    @property
    def out_is_projected(self) -> bool:
        """Whether @out is what the projector hands to the decoder, not the output of the tower."""
        return IMAGE in self.layouts


def open_vlm(model: nn.Module) -> Vlm | None:
    """The parts of a vision-language model; None if it is none that is known; Uncuttable if its decoder cannot be cut."""
    folders = [_folder(base) for base in type(model).__mro__]
    family = next((VLM_FAMILIES[name] for name in folders if name in VLM_FAMILIES), None)
    if family is None:
        return None
    name = type(model).__name__
    if family.no_cut:
        raise Uncuttable(f"{name}: {family.no_cut}")
    inner: Any = getattr(model, "model", model)
    if not hasattr(inner, family.decoder) or not hasattr(inner, family.merger):
        if family.opens_tower or hasattr(inner, "visual"):
            raise Uncuttable(f"{name} is not laid out as in transformers 5; install transformers>=5")
        return None  # a tower or a decoder of its own
    named = {IMAGE: family.layouts, VIDEO: family.video_layouts}
    layouts: dict[str, TokenLayouts] = {medium: resolve(function) for medium, function in named.items() if function}
    vlm = Vlm(family.title, model, inner, open_decoder(getattr(inner, family.decoder), name), None, merger=family.merger)
    vlm.blocks = resolve(family.blocks) if family.blocks else None
    vlm.blocks_pass_window = family.blocks_pass_window
    if not family.opens_tower or inner.config.vision_config.model_type in SIZED_TOWERS:
        vlm.layouts = layouts
    try:
        tower = _tower(inner, family)
    except Uncuttable as error:
        if family.packed_tower:
            vlm.packed_tower = resolve(family.packed_tower)(inner)
        if family.images:
            return replace(vlm, reason=error.reason, images=resolve(family.images)(inner))
        has_own_reason = family.opens_tower and not vlm.layouts
        return replace(vlm, reason=error.reason, no_resize_reason=error.reason if has_own_reason else family.no_resize)
    if family.has_tiles:
        tower = replace(tower, resize=None, no_resize_reason=family.no_resize)
        reason = "it packs the tiles of an image behind its tower"
        return replace(vlm, reason=reason, tile_tower=tower, no_resize_reason=family.no_resize)
    return replace(vlm, tower=tower)


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
    """The tower up to the layer whose tokens the model takes."""
    if not (family.opens_tower or family.has_tiles):
        raise Uncuttable(f"{family.no_tower}; use @out or @llm.0")
    config = inner.config
    if config.vision_config.model_type in SIZED_TOWERS:
        raise Uncuttable(f"{NO_SIZED_TOWER}; use @out or @llm.0")
    tower = hf.open_tower(inner.vision_tower)
    if tower is None:
        raise Uncuttable(
            f"its vision tower, a {type(inner.vision_tower).__name__}, is of no family that can be cut; use @llm.0"
        )
    layer = getattr(config, "vision_feature_layer", -1)
    if not isinstance(layer, int):
        raise Uncuttable(f"it joins the tokens of several layers ({layer}), which would have to be cut alike; use @llm.0")
    if tower.prefix and config.vision_feature_select_strategy == "full":
        raise Uncuttable('it shows CLS to the decoder (vision_feature_select_strategy="full"); use @llm.0')
    used = layer if layer >= 0 else tower.depth + 1 + layer
    if used < 1:
        raise Uncuttable(f"it takes the tokens before the first block (vision_feature_layer={layer}); use @llm.0")
    return replace(
        tower,
        family=f"{tower.family} in {family.title}",
        blocks=tower.blocks[:used],
        full_depth=tower.depth,
        pools_cls=False,
        patch_pooling=lambda _: [],
        entries=[replace(entry, kind="part") for entry in tower.entries],
    )
