"""Tiny vision-language models with random weights, and prompts for them: what `tokensieve families` and the tests try."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IMAGE, PAD = 63, 0  # ids
DECODERS = ("llama", "qwen2", "mistral", "qwen3")
GRID = 6  # patches a side


def llava(decoder: str = "llama", implementation: str = "sdpa", layer: int = -2, seed: int = 0) -> Any:
    """A LLaVA with a CLIP tower of 36 patches and a decoder of 6 layers."""
    from transformers import (
        AutoConfig,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    text = AutoConfig.for_model(
        decoder,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
    )
    vision = CLIPVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=24, patch_size=4
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        image_seq_length=GRID**2,
        vision_feature_layer=layer,
    )
    config._attn_implementation = implementation
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():  # larger than usual, so that attention is not uniform
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.generation_config.eos_token_id = None
    return model


def prompts(images: tuple[int, ...] = (1, 1), words: tuple[int, ...] = (5, 5), seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts, each with so many images and so many words after them."""
    made = torch.Generator().manual_seed(seed)
    rows = []
    for count, n_words in zip(images, words, strict=True):
        parts = [torch.tensor([1, 7])]
        for _ in range(count):
            parts += [torch.full((GRID**2,), IMAGE), torch.tensor([9])]
        parts.append(torch.randint(10, 60, (n_words,), generator=made))
        rows.append(torch.cat(parts))
    length = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_full((length - len(row),), PAD), row]) for row in rows])
    pixels = torch.randn(sum(images), 3, 24, 24, generator=made)
    mask = torch.stack([(torch.arange(length) >= length - len(row)).long() for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}


def model_and_inputs(family: str) -> tuple[Any, dict[str, Tensor]]:
    """A model of a declared family (models/families.py) with two prompts for it."""
    return (llava(), prompts()) if family == "llava" else relative(family)


def relative(family: str) -> tuple[Any, dict[str, Tensor]]:
    """A model of another family with two prompts for it, the second with a smaller picture and left padding."""
    return {"llava_next": _llava_next, "llava_onevision": _llava_onevision}.get(family, lambda: _qwen(family))()


def _text(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _settle(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    return model.eval()


def _padded(counts: list[int], **more: Tensor) -> dict[str, Tensor]:
    """Prompts with so many placeholders."""
    rows = [torch.cat([torch.tensor([1, 7]), torch.full((n,), IMAGE), torch.tensor([9, 11, 12, 20 + n % 30])]) for n in counts]
    length = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_full((length - len(row),), PAD), row]) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), **more}


def _llava_next() -> tuple[Any, dict[str, Tensor]]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig, LlavaNextForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=24, patch_size=4
    )
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=LlamaConfig(**_text()),
        image_token_id=IMAGE,
        image_grid_pinpoints=[[24, 48], [48, 24], [48, 48]],
    )
    model = _settle(LlavaNextForConditionalGeneration(config))
    made = torch.Generator().manual_seed(0)
    sizes = torch.tensor([[48, 48], [20, 44]])
    pixels = torch.randn(2, 5, 3, 24, 24, generator=made)
    features = model.model.get_image_features(pixels, sizes, return_dict=True).pooler_output
    return model, _padded([len(f) for f in features], pixel_values=pixels, image_sizes=sizes)


def _llava_onevision() -> tuple[Any, dict[str, Tensor]]:
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        Qwen2Config,
        SiglipVisionConfig,
    )

    vision = SiglipVisionConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=24,
        patch_size=4,
        vision_use_head=False,
    )
    config = LlavaOnevisionConfig(
        vision_config=vision,
        text_config=Qwen2Config(**_text()),
        image_token_id=IMAGE,
        video_token_id=62,
        image_grid_pinpoints=[[24, 48], [48, 24], [48, 48]],
        vision_aspect_ratio="anyres_max_9",
    )
    model = _settle(LlavaOnevisionForConditionalGeneration(config))
    made = torch.Generator().manual_seed(0)
    sizes = torch.tensor([[48, 48], [20, 44]])
    pixels = torch.randn(2, 5, 3, 24, 24, generator=made)
    features = model.model.get_image_features(pixels, sizes, return_dict=True).pooler_output
    return model, _padded([len(f) for f in features], pixel_values=pixels, image_sizes=sizes)


def _qwen(family: str) -> tuple[Any, dict[str, Tensor]]:
    import transformers

    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    shared = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision = {
        "qwen2_vl": {**shared, "embed_dim": 16, "hidden_size": 32},
        "qwen2_5_vl": {
            **shared,
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 24,
            "fullatt_block_indexes": [1],
        },
        "qwen3_vl": {
            **shared,
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 24,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
        },
    }[family]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config=_text(rope_parameters=rope, head_dim=8),
        image_token_id=IMAGE,
        video_token_id=62,
        vision_start_token_id=61,
        vision_end_token_id=60,
    )
    model = _settle(getattr(transformers, f"{name}ForConditionalGeneration")(config))
    grids = torch.tensor([[1, 8, 8], [1, 4, 6]])
    made = torch.Generator().manual_seed(0)
    pixels = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4, generator=made)
    batch = _padded([16, 6], pixel_values=pixels, image_grid_thw=grids)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    return model, batch
