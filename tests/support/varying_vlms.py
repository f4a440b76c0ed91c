"""Tiny LLaVA-NeXT, OneVision and Qwen-VL in folders, with processors: images have different numbers of vision tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.vlm_models import IMAGE, PAD, relative

CHAT = (
    "{% for m in messages %}user : {% for part in m['content'] %}{% if part['type'] == 'image' %}<image> "
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %} assistant :"
)


def save_varying(folder: Path, family: str) -> str:
    """A model of random weights of this family, with a processor."""
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor, Qwen2VLImageProcessor, Qwen2VLProcessor
    from transformers.models.qwen2_vl import Qwen2VLVideoProcessor

    model, words = relative(family)[0], _tokenizer()
    if family == "llava_next":
        images = LlavaNextImageProcessor(
            size={"shortest_edge": 24},
            crop_size={"height": 24, "width": 24},
            image_grid_pinpoints=[[24, 48], [48, 24], [48, 48]],
        )
        processor: Any = LlavaNextProcessor(
            image_processor=images,
            tokenizer=words,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=CHAT,
        )
    elif family == "llava_onevision":
        from transformers import LlavaOnevisionImageProcessor, LlavaOnevisionProcessor, LlavaOnevisionVideoProcessor

        processor = LlavaOnevisionProcessor(
            image_processor=LlavaOnevisionImageProcessor(
                size={"height": 24, "width": 24}, image_grid_pinpoints=[[24, 48], [48, 24], [48, 48]]
            ),
            video_processor=LlavaOnevisionVideoProcessor(),
            tokenizer=words,
            num_image_tokens=36,
            vision_feature_select_strategy="full",
            chat_template=CHAT,
        )
    else:
        sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 16 * 16, "max_pixels": 48 * 48}
        processor = Qwen2VLProcessor(
            image_processor=Qwen2VLImageProcessor(**sizes),
            video_processor=Qwen2VLVideoProcessor(),
            tokenizer=words,
            chat_template=CHAT,
        )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", "user", "assistant", ":", "?", "what", "is", "red", "blue"]
    known += [f"word{number}" for number in range(IMAGE - 1 - len(known))] + ["<video>", "<image>"]
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        extra_special_tokens={"image_token": "<image>", "video_token": "<video>"},
    )
    assert made.pad_token_id == PAD and made.convert_tokens_to_ids("<image>") == IMAGE
    return made
