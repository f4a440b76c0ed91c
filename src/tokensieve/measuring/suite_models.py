"""The models and plans of `tokensieve bench --suite`: one or more of each family, with random weights of moderate size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve import embedded
from tokensieve.measuring import generation
from tokensieve.models import loading
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.testing import tiny_models, tiny_vlms

TEXT_TOKENS = 35
TOWER_PLANS = {
    "one cut, drop": "anchor@4:60",
    "one cut, merge": "anchor@4:60(rest=merge)",
    "three cuts": "anchor@3:120 + anchor@6:80 + anchor@9:50",
    "12 cuts": "pool@*.attn:-8",
}
LLM_PLANS = {
    "llm, no attention": "grid@llm.2:64",
    "llm, own attention": "anchor@llm.2:64",
    "llm, previous attention": "anchor@llm.2:64(attention=previous)",
}
LLAVA_PLANS = {
    "out": "anchor@out:64",
    "three cuts": "grid@out:288 + grid@llm.3:144 + grid@llm.6:64",
    "llm, merge": "grid@llm.2:64(rest=merge)",
    **LLM_PLANS,
}
TWO_STAGE = {"two stages": "merger@out + cross@llm.3,6,9(rest=merge)"}
TINY_TOWER_PLANS = {
    "one cut, drop": "anchor@1:6(k=2)",
    "one cut, merge": "anchor@1:6(k=2,rest=merge)",
    "12 cuts": "pool@*.attn:-2",
}
TINY_LLM_PLANS = {name: plan.replace(":64", ":6") for name, plan in LLM_PLANS.items()}
TINY_LLAVA_PLANS = {"out": "anchor@out:9(k=2)", "llm, merge": "grid@llm.2:6(rest=merge)", **TINY_LLM_PLANS}


@dataclass(frozen=True)
class SuiteModel:
    """A model of the suite."""

    name: str
    plans: Mapping[str, str]  # by case
    gflops: float  # of the full model for one image, or one prompt with its answer: for the expected time
    build: Callable[[], nn.Module]
    prompts: Callable[[nn.Module, int], Mapping[str, Tensor]] | None = None  # of a vision-language model


def suite_models() -> list[SuiteModel]:
    """The models of the suite."""
    return [
        _tower("ViT-B-16", 35, partial(loading.architecture, "ViT-B-16")),
        _tower("vit_base_patch16_224", 35, partial(loading.architecture, "vit_base_patch16_224", model_type="timm")),
        _tower("clip-vit-base-patch16", 35, partial(loading.architecture, "clip-vit-base-patch16", model_type="hf")),
        _tower("siglip-small-patch16-224", 9.4, partial(_small, "SiglipVision", patch_size=16)),
        _tower("dinov2-small", 12.3, partial(_small, "Dinov2", patch_size=14)),
        SuiteModel("LLaVA 12 x 512", LLAVA_PLANS, 68, llava, _llava_prompts),
        SuiteModel("Qwen2.5-VL 6 x 512", LLM_PLANS, 33, partial(qwen, "Qwen2_5_VL"), _qwen_prompts),
        SuiteModel("Qwen3-VL 6 x 512", LLM_PLANS, 33, partial(qwen, "Qwen3VL"), _qwen_prompts),
        SuiteModel(embedded.LLAVA, TWO_STAGE, 3, lambda: load_vlm.load(embedded.LLAVA).model, generation.prompts),
    ]


def tiny_suite_models() -> list[SuiteModel]:
    """Tiny models, to try the suite itself."""
    return [
        SuiteModel("tiny open_clip", TINY_TOWER_PLANS, 0.001, tiny_models.open_clip_model),
        SuiteModel("tiny timm", TINY_TOWER_PLANS, 0.001, tiny_models.timm_model),
        SuiteModel("tiny SigLIP", TINY_TOWER_PLANS, 0.001, partial(tiny_models.hf_model, "SiglipVision")),
        SuiteModel("tiny LLaVA", TINY_LLAVA_PLANS, 0.001, tiny_vlms.llava, generation.prompts),
        SuiteModel("tiny Qwen3-VL", TINY_LLM_PLANS, 0.001, lambda: tiny_vlms.relative("qwen3_vl")[0], _tiny_qwen_prompts),
    ]


def _tower(name: str, gflops: float, build: Callable[[], nn.Module]) -> SuiteModel:
    return SuiteModel(name, TOWER_PLANS, gflops, build)


def _small(kind: str, **changes: int) -> nn.Module:
    """A vision tower of Hugging Face: 12 blocks of width 384, images of 224 pixels."""
    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6}
    return tiny_models.hf_model(kind, **shape, image_size=224, **changes)


def text_shape(layers: int, width: int) -> dict[str, Any]:
    """The settings of a small Llama or Qwen decoder, with heads of width 64."""
    return {
        "vocab_size": 4096,
        "hidden_size": width,
        "intermediate_size": 43 * width // 16,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "head_dim": 64,
        "max_position_embeddings": 32_768,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def llava(side: int = 24, layers: int = 12, width: int = 512, tower_layers: int = 4, tower_width: int = 384) -> nn.Module:
    """A LLaVA with side x side patches: a CLIP tower, and a Llama decoder."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=tower_width,
        intermediate_size=4 * tower_width,
        num_hidden_layers=tower_layers,
        num_attention_heads=tower_width // 64,
        image_size=14 * side,
        patch_size=14,
    )
    text = LlamaConfig(**text_shape(layers, width))
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=3, image_seq_length=side**2)
    return LlavaForConditionalGeneration(config)


def qwen(name: str) -> nn.Module:
    """A Qwen-VL with a small tower, and a decoder of 6 layers of width 512."""
    import transformers

    vision: dict[str, Any] = {
        "depth": 3,
        "num_heads": 1,
        "hidden_size": 64,
        "intermediate_size": 256,
        "out_hidden_size": 512,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    vision |= {"deepstack_visual_indexes": [0, 1, 2]} if name == "Qwen3VL" else {"fullatt_block_indexes": [2]}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]}
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config=text_shape(6, 512) | {"rope_parameters": rope, "num_key_value_heads": 2},
        image_token_id=3,
        video_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )
    model: nn.Module = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model


def _llava_prompts(model: nn.Module, batch_size: int) -> dict[str, Tensor]:
    return generation.prompts(model, batch_size, TEXT_TOKENS)


def _qwen_prompts(model: nn.Module, batch_size: int) -> dict[str, Tensor]:
    return qwen_prompts(model, batch_size, 24, TEXT_TOKENS)


def _tiny_qwen_prompts(model: nn.Module, batch_size: int) -> dict[str, Tensor]:
    return qwen_prompts(model, batch_size, 4, 8)


def qwen_prompts(model: Any, batch_size: int, side: int, text_tokens: int) -> dict[str, Tensor]:
    """Random prompts for a Qwen-VL, each a noise image of side x side tokens between random words."""
    config, vision = model.config, model.config.vision_config
    generator = torch.Generator().manual_seed(0)
    patches = vision.spatial_merge_size * side
    words = torch.randint(10, config.text_config.vocab_size - 10, (batch_size, text_tokens), generator=generator)
    ids = torch.cat([words[:, :1], torch.full((batch_size, side**2), config.image_token_id), words[:, 1:]], dim=1)
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
        "pixel_values": torch.randn(batch_size * patches**2, pixels, generator=generator),
        "image_grid_thw": torch.tensor([[1, patches, patches]] * batch_size),
    }
