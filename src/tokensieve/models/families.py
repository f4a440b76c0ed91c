"""Declarations of model families: which models can be opened, by which code, with examples. This module imports no torch.

A family is a module beside this one, which opens its models, and a declaration here. A plug-in declares its own:

    FAMILIES.add(Family("mine", "my_model's towers", open_tower="my_model:open_tower", encoder="my_model:image_encoder"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokensieve.registry import Registry

TINY = "tokensieve.testing.tiny_models"
TINY_VLMS = "tokensieve.testing.tiny_vlms"


@dataclass(frozen=True)
class Example:
    """Well-known models of a family, and a tiny random one on which `tokensieve families` tries every cut."""

    models: str
    build: str  # "module:function", (**options) -> model; of a vision-language model: (model, inputs)
    options: Mapping[str, Any] = field(default_factory=dict)
    extra: str = ""  # what the prefix tokens after CLS are
    name: str = ""  # shown where the model cannot be opened, or instead of its family's title


@dataclass(frozen=True)
class Family:
    """A library or a kind of model whose vision tower can be opened. Functions are named as "module:function"."""

    name: str
    description: str  # which models, for the message about a model of no family
    open_tower: str  # (model) -> Tower; None if it is not of this family; Uncuttable if it is, but cannot be cut
    encoder: str | None = None  # (model, unscaled) -> function (B, 3, h, w) -> (B, E); None if it is not of this family
    order: int = 0  # families with a lower number are tried first; those of plug-ins come before ours
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class VlmFamily:
    """A family of vision-language models of transformers, whose decoder can be opened."""

    name: str  # of the folder in transformers.models
    title: str
    example: Example
    opens_tower: bool = False  # the decoder gets the tower's tokens one by one, so that the tower can be cut too
    has_tiles: bool = False  # the tower sees tiles of an image, and its inner model packs them with pack_image_features
    packed_tower: str = ""  # "module:function", (inner model) -> its tower, whose batch is one sequence; "": it is none
    no_tower: str = ""  # why the tower cannot be opened, where none of these opens it
    images: str = ""  # "module:function", (inner model) -> how it takes images of any size; "": they have one size, or tiles
    layouts: str = ""  # "module:function", image_grid.TokenLayouts: the tokens of each image; "": those of the tower
    video_layouts: str = ""  # the same of videos; "": the model takes none
    decoder: str = "language_model"  # attribute of the model that puts image features into the sequence: its decoder
    merger: str = "get_placeholder_mask"  # its method that gets input_ids, inputs_embeds and the image features
    blocks: str = ""  # "module:function", image_blocks.ImageBlocks: tokens that see each other in both directions; "": none
    blocks_pass_window: bool = False  # in layers with a window: also where they are further apart
    others: tuple[Example, ...] = ()  # models of other kinds, shown on lines of their own
    no_cut: str = ""  # why it can be cut nowhere; "": it can
    no_resize: str = "its processor cuts images into tiles before the model sees them; give it smaller images"  # why not


FAMILIES: Registry[Family] = Registry("model family")
VLM_FAMILIES: Registry[VlmFamily] = Registry("family of vision-language models")


def _declare(name: str, description: str, order: int, encoder: bool, *examples: Example) -> None:
    module = f"tokensieve.models.{name}"
    encode = f"{module}:image_encoder" if encoder else None
    FAMILIES.add(Family(name, description, f"{module}:open_tower", encode, order, examples), origin=__name__)


def _declare_vlm(name: str, title: str, models: str, **more: Any) -> None:
    example = Example(models, f"{TINY_VLMS}:model_and_inputs", {"family": name})
    VLM_FAMILIES.add(VlmFamily(name, title, example, **more), origin=__name__)


def _example(models: str, build: str, extra: str = "", name: str = "", **options: Any) -> Example:
    return Example(models, f"{TINY}:{build}", options, extra, name)


_MAP: dict[str, Any] = {"class_token": False, "global_pool": "map"}  # attention pooling with a learned query, as SigLIP's
_QUERIES: dict[str, Any] = {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 4}
_RESNET: dict[str, Any] = {"layers": [1, 1, 1, 1], "width": 8, "image_size": 64}

_declare("vlm", "", 1, False)
_declare(
    "open_clip",
    "open_clip models with a VisionTransformer or a timm tower (CLIP, CoCa, SigLIP, EVA02)",
    2,
    True,
    _example("ViT-B-16, ViT-L-14-336", "open_clip_model"),
    _example("coca_ViT-B-32", "open_clip_model", **_QUERIES),
    _example("ViT-B-16-SigLIP, ViT-SO400M-14-SigLIP-384", "open_clip_timm_model", **_MAP),
    _example("EVA02-B-16, EVA02-L-14-336", "open_clip_eva_model", swiglu_mlp=True, global_pool="token"),
    _example("RN50", "open_clip_model", name="open_clip ModifiedResNet", **_RESNET),
)
_declare(
    "timm",
    "timm VisionTransformers (DeiT, DINOv2, ...) and Eva",
    3,
    True,
    _example("vit_base_patch16_224, deit3_base_patch16_224", "timm_model"),
    _example("vit_base_patch14_reg4_dinov2", "timm_model", "registers", reg_tokens=4, init_values=1e-5),
    _example("deit_base_distilled_patch16_224", "distilled_model", "distillation"),
    _example("vit_base_patch16_siglip_224", "timm_model", **_MAP),
    _example("vit_base_patch16_siglip_gap_224", "timm_model", class_token=False, global_pool="avg"),
    _example("eva02_base_patch14_448", "eva_model", swiglu_mlp=True, scale_mlp=True, qkv_fused=False),
    _example("vit_base_patch16_dinov3", "eva_model", "registers", rope_type="dinov3", num_reg_tokens=4),
    _example("vit_base_patch16_rope_mixed_224", "eva_model", rope_type="mixed", attn_type="rope", global_pool="token"),
)
_declare(
    "hf",
    "Hugging Face CLIP, SigLIP, SigLIP2, ViT, DeiT, DINOv2 and DINOv3",
    4,
    True,
    _example("openai/clip-vit-base-patch16", "hf_model", kind="CLIPVision"),
    _example("google/siglip-base-patch16-224", "hf_model", kind="SiglipVision"),
    _example("google/siglip2-base-patch16-naflex", "hf_model", kind="Siglip2Vision"),
    _example("google/vit-base-patch16-224", "hf_model", kind="ViT"),
    _example("facebook/deit-base-distilled-patch16-224", "hf_model", "distillation", kind="DeiT"),
    _example("facebook/dinov2-base", "hf_model", kind="Dinov2"),
    _example("facebook/dinov2-with-registers-base", "hf_model", "registers", kind="Dinov2WithRegisters", num_register_tokens=4),
    _example("facebook/dinov3-vitb16-pretrain-lvd1689m", "hf_model", "registers", kind="DINOv3ViT", num_register_tokens=4),
)

_GRID = "tokensieve.models.image_grid"
_QWEN: dict[str, Any] = {
    "packed_tower": "tokensieve.models.packed_tower:open_packed",
    "no_tower": "its tower joins the patches of all images to one sequence, and cannot be cut apart from the model",
    "images": "tokensieve.models.qwen_vl:open_images",
    "layouts": f"{_GRID}:qwen_layouts",
    "video_layouts": f"{_GRID}:qwen_video_layouts",
}
_TILES: dict[str, Any] = {"has_tiles": True, "layouts": f"{_GRID}:tile_layouts"}
_TILES_AND_VIDEOS = _TILES | {"video_layouts": f"{_GRID}:pooled_video_layouts"}
_SIZED = f"{_GRID}:sized_layouts"
_ROWS = "its processor writes the rows of each image into the prompt; give it smaller images"
_PIXTRAL = Example("mistral-community/pixtral-12b", f"{TINY_VLMS}:pixtral", {"merge": 1}, name="Pixtral")
_declare_vlm(
    "llava", "LLaVA", "llava-hf/llava-1.5-7b-hf", opens_tower=True, layouts=_SIZED, others=(_PIXTRAL,), no_resize=_ROWS
)
_declare_vlm("llava_next", "LLaVA-NeXT", "llava-hf/llava-v1.6-mistral-7b-hf", **_TILES)
_declare_vlm("llava_onevision", "LLaVA-OneVision", "llava-hf/llava-onevision-qwen2-7b-ov-hf", **_TILES_AND_VIDEOS)
_declare_vlm("qwen2_vl", "Qwen2-VL", "Qwen/Qwen2-VL-7B-Instruct", **_QWEN)
_declare_vlm("qwen2_5_vl", "Qwen2.5-VL", "Qwen/Qwen2.5-VL-7B-Instruct", **_QWEN)
_declare_vlm("qwen3_vl", "Qwen3-VL", "Qwen/Qwen3-VL-8B-Instruct", **_QWEN)

_PROMPT, _BLOCKS = "tokensieve.models.image_tiles", "tokensieve.models.image_blocks"
_SQUARES = "so its tower could lose whole squares only, which is not built"
_FOLDED = f"its projector folds squares of patches in the complete grid of a tile (pixel shuffle), {_SQUARES}"
_declare_vlm("internvl", "InternVL", "OpenGVLab/InternVL3-8B-hf", layouts=f"{_PROMPT}:run_layouts", no_tower=_FOLDED)
_MARKED: dict[str, Any] = {"decoder": "text_model", "layouts": f"{_PROMPT}:marked_layouts", "no_tower": _FOLDED}
_declare_vlm("idefics3", "Idefics3", "HuggingFaceM4/Idefics3-8B-Llama3", merger="inputs_merger", **_MARKED)
_declare_vlm("smolvlm", "SmolVLM", "HuggingFaceTB/SmolVLM2-2.2B-Instruct", **_MARKED)
_POOLED: dict[str, Any] = {
    "layouts": f"{_GRID}:pooled_layouts",
    "no_tower": f"its projector averages squares of patches in the complete grid of an image, {_SQUARES}",
    "no_resize": "its images have one size",
}
_declare_vlm("gemma3", "Gemma 3", "google/gemma-3-4b-it", blocks=f"{_BLOCKS}:image_runs", **_POOLED)
_SECOND = Example("google/paligemma2-3b-mix-224", f"{TINY_VLMS}:paligemma", {"version": 2}, name="PaliGemma 2")
_PREFIX: dict[str, Any] = {"blocks": f"{_BLOCKS}:prefix", "blocks_pass_window": True}
_declare_vlm("paligemma", "PaliGemma", "google/paligemma-3b-mix-224", opens_tower=True, others=(_SECOND,), **_PREFIX)
_UNFOLDED = (
    "its tower joins images to one sequence with a mask for all patches, and its projector merges squares of patches in the "
    f"complete grid of each image, {_SQUARES}"
)
_SIZED_ROWS: dict[str, Any] = {"layouts": _SIZED, "no_tower": _UNFOLDED, "no_resize": _ROWS}
_declare_vlm("mistral3", "Mistral 3", "mistralai/Mistral-Small-3.1-24B-Instruct-2503", **_SIZED_ROWS)
_COUNTS = "its layers without rotary angles scale each query by its number among the tokens they get, which a cut would change"
_declare_vlm("llama4", "Llama 4", "meta-llama/Llama-4-Scout-17B-16E-Instruct", no_cut=_COUNTS)
_CROSS = "its language model looks at images by cross-attention, so the sequence holds no image tokens that could be cut"
_declare_vlm("mllama", "Mllama", "meta-llama/Llama-3.2-11B-Vision-Instruct", no_cut=_CROSS)
