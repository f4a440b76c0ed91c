"""Prompts with videos and images for tiny models, made by the stock processors of their families."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from tests.support.vlm_models import IMAGE, PAD, relative

VIDEO, START, END = 62, 61, 60
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision")
MEDIA = {"qwen": ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")}
PLAIN = ("<image>", "<video>")
WORDS = ["what", "moves", "left", "first", "then", "how", "many", "when", "red", "seconds"]


def media(family: str) -> tuple[str, str]:
    """How a prompt of this family writes an image and a video."""
    if family == "qwen3_vl":  # its processor writes the marks of each frame itself
        return MEDIA["qwen"][0], "<|video_pad|>"
    return MEDIA["qwen"] if family.startswith("qwen") else PLAIN


def tokenizer(family: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    qwen = family.startswith("qwen")
    image, video = ("<|image_pad|>", "<|video_pad|>") if qwen else PLAIN
    marks = {image: IMAGE, video: VIDEO, "<|vision_start|>": START, "<|vision_end|>": END}
    vocab = {"<pad>": PAD, "<s>": 1, "</s>": 2, "<unk>": 3, **{word: 10 + i for i, word in enumerate(WORDS)}}
    vocab |= {f"{i}": 30 + i for i in range(10)} | marks
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special: Any = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", additional_special_tokens=[*marks], **special)


def processor(family: str) -> Any:
    import transformers

    words = tokenizer(family)
    if family == "llava_onevision":
        sizes: dict[str, Any] = {"size": {"height": 24, "width": 24}}
        return transformers.LlavaOnevisionProcessor(
            transformers.LlavaOnevisionImageProcessor(image_grid_pinpoints=[[24, 48], [48, 24], [48, 48]], **sizes),
            words,
            transformers.LlavaOnevisionVideoProcessor(**sizes),
            num_image_tokens=36,
            vision_feature_select_strategy="full",
        )
    shape: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 100_000}}
    images = transformers.Qwen2VLImageProcessor(**shape)
    if family == "qwen3_vl":
        videos = transformers.Qwen3VLVideoProcessor(**shape, do_sample_frames=False)
        return transformers.Qwen3VLProcessor(images, words, videos)
    videos = transformers.Qwen2VLVideoProcessor(**shape, do_sample_frames=False)
    kind = transformers.Qwen2VLProcessor if family == "qwen2_vl" else transformers.Qwen2_5_VLProcessor
    return kind(images, words, videos)


def batch_of(family: str, texts: list[str], images: list[Any], videos: list[Any]) -> dict[str, Tensor]:
    """texts: with {image} and {video} where they stand."""
    image, video = media(family)
    has_times = family == "qwen3_vl" and videos
    more: Any = {"videos_kwargs": {"video_metadata": [_seconds(each) for each in videos]}} if has_times else {}
    made = processor(family)(
        text=[text.format(image=image, video=video) for text in texts],
        images=images or None,
        videos=videos or None,
        padding=True,
        return_tensors="pt",
        **more,
    )
    return {name: value for name, value in made.items() if isinstance(value, Tensor)}


def _seconds(frames: np.ndarray) -> dict[str, Any]:
    n = len(frames)
    return {"fps": 2.0, "total_num_frames": n, "frames_indices": list(range(n)), "duration": n / 2}


TEXTS = ["{video} what moves left", "{image} {video} how many then {video} when", "red {image} first"]


def pictures_and_clips(family: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Two images, and three videos of different sizes where the family allows it, as TEXTS need them."""
    draws = np.random.default_rng(9)
    images = [draws.integers(0, 255, (h, w, 3), dtype=np.uint8) for h, w in ((32, 24), (24, 40))]
    frames = (4, 4, 4) if family == "llava_onevision" else (6, 4, 6)
    sizes = ((16, 24), (24, 16), (16, 16))
    return images, [draws.integers(0, 255, (t, h, w, 3), dtype=np.uint8) for t, (h, w) in zip(frames, sizes, strict=True)]


def model_and_batch(family: str) -> tuple[Any, dict[str, Tensor]]:
    """Three prompts: a video; an image and two videos; an image."""
    model, _ = relative(family)
    return model, batch_of(family, TEXTS, *pictures_and_clips(family))
