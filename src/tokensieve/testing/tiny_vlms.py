"""Tiny vision-language models with random weights, and prompts for them: what `tokensieve families` and the tests try."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

IMAGE, PAD = 63, 0  # ids
DECODERS = ("llama", "qwen2", "mistral", "qwen3")
GRID = 6  # patches a side


def llava(decoder: str = "llama", implementation: str = "sdpa", layer: int = -2, seed: int = 0, **text_options: Any) -> Any:
    """A LLaVA with a CLIP tower of 36 patches and a decoder of 6 layers. text_options: of the decoder's config."""
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
        **text_options,
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
    """A model of another family with two prompts for it, the second shorter, with left padding and other images."""
    builders: dict[str, Callable[[], tuple[Any, dict[str, Tensor]]]] = {
        "llava_next": _llava_next,
        "llava_onevision": _llava_onevision,
        "internvl": _internvl,
        "idefics3": partial(_idefics, "Idefics3"),
        "smolvlm": partial(_idefics, "SmolVLM"),
        "gemma3": _gemma3,
        "paligemma": paligemma,
        "mistral3": pixtral,
        "llama4": _llama4,
        "mllama": _mllama,
    }
    return builders.get(family, partial(_qwen, family))()


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


def _prompts_of(images: list[list[list[int]]], **more: Tensor) -> dict[str, Tensor]:
    """Left-padded prompts of different length. images: for each prompt the ids of each of its images, with their marks."""
    rows = []
    for number, ids in enumerate(images):
        words = [20 + len(ids), 31, 12][number:]
        rows.append(torch.tensor([1, 7, *(token for image in ids for token in (*image, 9)), 11, *words]))
    length = max(map(len, rows))
    padded = torch.stack([torch.cat([row.new_full((length - len(row),), PAD), row]) for row in rows])
    return {"input_ids": padded, "attention_mask": (padded != PAD).long(), **more}


def _internvl() -> tuple[Any, dict[str, Tensor]]:
    """Tiles of 9 tokens: an image of three tiles; one of a single tile and one of two."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration, Qwen2Config

    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": [24, 24],
        "patch_size": [4, 4],
    }
    config = InternVLConfig(vision_config=vision, text_config=Qwen2Config(**_text()), image_token_id=IMAGE, image_seq_length=9)
    pixels = torch.randn(6, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    images = [[[61, *[IMAGE] * 27, 60]], [[61, *[IMAGE] * 9, 60], [61, *[IMAGE] * 18, 60]]]
    return _settle(InternVLForConditionalGeneration(config)), _prompts_of(images, pixel_values=pixels)


def _marked(rows: int, columns: int) -> list[int]:
    """An image of Idefics3: tiles with their places in front of them, line ends, then the whole image."""
    ids = []
    for row in range(rows):
        for column in range(columns):
            ids += [61, 40 + row * 4 + column, *[IMAGE] * 9]
        ids.append(59)
    return [*ids, 61, 58, *[IMAGE] * 9, 61]


def _idefics(name: str) -> tuple[Any, dict[str, Tensor]]:
    """Tiles of 9 tokens: an image of five tiles; an image that is not cut into tiles and one of two."""
    import transformers

    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 24,
        "patch_size": 4,
    }
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**_text()),
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=PAD,
    )
    pixels = torch.randn(2, 5, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    seen = torch.ones((2, 5, 24, 24), dtype=torch.long)
    seen[0, 3, :, 18:] = 0  # a tile at the edge of its image
    pixels[1, 3:], seen[1, 3:] = 0, 0
    batch = _prompts_of([[_marked(2, 2)], [_marked(0, 0), _marked(1, 1)]], pixel_values=pixels, pixel_attention_mask=seen)
    return _settle(getattr(transformers, f"{name}ForConditionalGeneration")(config)), batch


def _siglip(**more: Any) -> Any:
    from transformers import SiglipVisionConfig

    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return SiglipVisionConfig(**sizes, image_size=24, patch_size=4, vision_use_head=False, **more)


def _gemma3() -> tuple[Any, dict[str, Tensor]]:
    """Images of 9 tokens, a window of 12, one layer of four without it."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    text = Gemma3TextConfig(**_text(head_dim=8, sliding_window=12, layer_types=kinds, query_pre_attn_scalar=8))
    config = Gemma3Config(
        vision_config=_siglip(),
        text_config=text,
        image_token_index=IMAGE,
        boi_token_index=61,
        eoi_token_index=60,
        mm_tokens_per_image=9,
    )
    image = [61, *[IMAGE] * 9, 60]
    batch = _prompts_of([[image, image], [image]])
    batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    batch["pixel_values"] = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    return _settle(Gemma3ForConditionalGeneration(config)), batch


def paligemma(version: int = 1) -> tuple[Any, dict[str, Tensor]]:
    """Images of 36 tokens before the text. Version 2 has a window in every other layer, and capped logits."""
    from transformers import Gemma2Config, GemmaConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration

    window = {"sliding_window": 40, "query_pre_attn_scalar": 8}
    text = Gemma2Config(**_text(head_dim=8, **window)) if version == 2 else GemmaConfig(**_text(head_dim=8))
    config = PaliGemmaConfig(
        vision_config=_siglip(projection_dim=32),
        text_config=text,
        image_token_index=IMAGE,
        projection_dim=32,
        hidden_size=32,
        vocab_size=64,
    )
    rows = [torch.tensor([IMAGE] * 36 * n + [1, 20, 31, 12, 15][: 7 - 2 * n] + [10]) for n in (2, 1)]
    length = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_full((length - len(row),), PAD), row]) for row in rows])
    pixels = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    mask = (ids != PAD).long()
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids), "pixel_values": pixels}
    return _settle(PaliGemmaForConditionalGeneration(config)), batch


def _rows_of_tokens(rows: int, columns: int) -> list[int]:
    """An image of Pixtral: a break after each row but the last."""
    return [token for row in range(rows) for token in (*[IMAGE] * columns, 60 if row == rows - 1 else 61)]


def pixtral(merge: int = 2) -> tuple[Any, dict[str, Tensor]]:
    """Images of 8 x 6, 4 x 6 and 4 x 4 patches. merge: side of the square that becomes one token (Mistral 3); 1: Pixtral."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision = transformers.PixtralVisionConfig(**sizes, image_size=32, patch_size=4)
    shared = {"vision_config": vision, "text_config": transformers.MistralConfig(**_text(head_dim=8, sliding_window=None))}
    if merge == 1:
        strategy = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        llava_config = transformers.LlavaConfig(**shared, image_token_id=IMAGE, **strategy)
        model: Any = transformers.LlavaForConditionalGeneration(llava_config)
    else:
        config = transformers.Mistral3Config(
            **shared, image_token_index=IMAGE, spatial_merge_size=merge, vision_feature_layer=-1
        )
        model = transformers.Mistral3ForConditionalGeneration(config)
    grids = [(8, 6), (4, 6), (4, 4)]
    pixels = torch.zeros(3, 3, 32, 24)
    made = torch.Generator().manual_seed(0)
    for image, (h, w) in zip(pixels, grids, strict=True):
        image[:, : h * 4, : w * 4] = torch.randn(3, h * 4, w * 4, generator=made)
    images = [_rows_of_tokens(h // merge, w // merge) for h, w in grids]
    image_sizes = torch.tensor([[h * 4, w * 4] for h, w in grids])
    return _settle(model), _prompts_of([images[:1], images[1:]], pixel_values=pixels, image_sizes=image_sizes)


def _llama4() -> tuple[Any, dict[str, Tensor]]:
    """A model that cannot be cut."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    text = _text(head_dim=8, num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=16)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 24,
        "patch_size": 4,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    }
    config = Llama4Config(vision_config=vision, text_config=text, image_token_index=IMAGE)
    return _settle(Llama4ForConditionalGeneration(config)), prompts()


def _mllama() -> tuple[Any, dict[str, Tensor]]:
    """A model that cannot be cut."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    text = _text(cross_attention_layers=[1], rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 24,
        "patch_size": 4,
        "vision_output_dim": 32,
        "intermediate_layers_indices": [1],
    }
    config = MllamaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    return _settle(MllamaForConditionalGeneration(config)), prompts()
