"""Tiny models with random weights in folders, of every family that vLLM serves under a plan.

LLaVA-1.5 has a SigLIP tower here; the embedded one has a CLIP tower.
vLLM has kernels for heads of 32 and more, so these are larger than other tiny models of the tests. Images have different sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL = ("[PAD]", "[BOS]", "[EOS]", "[UNK]", "<image>", "<video>", "<start>", "<end>")
PAD, BOS, EOS, UNK, IMAGE, VIDEO, START, END = range(len(SPECIAL))
WORDS = ("user", "assistant", ":", "?", "what", "is", "red", "blue", "above", "below", "how", "many")
VOCABULARY = 128
PROMPT = "user : {images} {question} assistant :"
QWEN = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
FAMILIES = (*QWEN, "llava_next", "llava_onevision", "llava_siglip")


def save(family: str, folder: Path) -> None:
    """A model of this family with its processor."""
    import torch

    model, processor = _qwen(family) if family in QWEN else _siglip() if family == "llava_siglip" else _tiled(family)
    made = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("image_newline"):
                parameter.normal_(std=0.12, generator=made)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _text() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }


def _qwen(family: str) -> tuple[Any, Any]:
    import transformers
    from transformers.models.qwen2_vl import Qwen2VLVideoProcessor

    shared = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    inner = {**shared, "hidden_size": 64, "out_hidden_size": 128, "intermediate_size": 96}
    vision = {
        "qwen2_vl": {**shared, "embed_dim": 64, "hidden_size": 128},
        "qwen2_5_vl": {**inner, "fullatt_block_indexes": [1], "window_size": 16},
        "qwen3_vl": {**inner, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    }[family]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    if family == "qwen3_vl":
        rope["mrope_interleaved"] = True
    name = QWEN[family]
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config=_text() | {"rope_parameters": rope},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 16 * 16, "max_pixels": 96 * 96}
    video = transformers.Qwen3VLVideoProcessor if family == "qwen3_vl" else Qwen2VLVideoProcessor
    words = _tokenizer()
    processor = getattr(transformers, f"{name}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes),
        video_processor=video(**{key: sizes[key] for key in ("patch_size", "merge_size", "temporal_patch_size")}),
        tokenizer=words,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), processor


def _tiled(family: str) -> tuple[Any, Any]:
    import transformers

    name = {"llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision"}[family]
    decoder, tower = (
        ("llama", transformers.CLIPVisionConfig) if family == "llava_next" else ("qwen2", transformers.SiglipVisionConfig)
    )
    pinpoints = [[32, 64], [64, 32], [64, 64]]
    vision = tower(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=4
    )
    text = transformers.AutoConfig.for_model(decoder, **_text())
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-2 if family == "llava_next" else -1,
        vision_feature_select_strategy="default" if family == "llava_next" else "full",
        tie_word_embeddings=False,
        **({} if family == "llava_next" else {"video_token_id": VIDEO}),
    )
    side = {"height": 32, "width": 32}
    options = {
        "tokenizer": _tokenizer(),
        "patch_size": 4,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
    }
    if family == "llava_next":
        images = transformers.LlavaNextImageProcessor(
            size={"shortest_edge": 32}, crop_size=side, image_grid_pinpoints=pinpoints
        )
        options |= {"num_additional_image_tokens": 1}
    else:
        images = transformers.LlavaOnevisionImageProcessor(size=side, image_grid_pinpoints=pinpoints)
        options |= {"num_image_tokens": 64, "video_processor": transformers.LlavaOnevisionVideoProcessor(size=side)}
    processor = getattr(transformers, f"{name}Processor")(image_processor=images, **options)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), processor


def _siglip() -> tuple[Any, Any]:
    import transformers

    vision = transformers.SiglipVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=4
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.AutoConfig.for_model("llama", **_text()),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    processor = transformers.LlavaProcessor(
        image_processor=transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
        tokenizer=_tokenizer(),
        patch_size=4,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = [*SPECIAL, *WORDS]
    known += [f"word{number}" for number in range(VOCABULARY - len(known))]
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        extra_special_tokens={
            "image_token": "<image>",
            "video_token": "<video>",
            "vision_bos_token": "<start>",
            "vision_eos_token": "<end>",
        },
    )
