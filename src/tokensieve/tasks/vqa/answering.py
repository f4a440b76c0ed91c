"""Asking a vision-language model questions about images or videos: prompts, greedy answers, the prefill pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tokensieve.data.videos import Video
from tokensieve.data.vqa_items import VqaItem
from tokensieve.errors import UserError
from tokensieve.models.loading.vlm import prompt

BARE, SHORT = "{question}", "{question}\nAnswer the question using a single word or phrase."  # prompts
MAX_NEW_TOKENS = 16


def ask(processor: Any, items: Sequence[VqaItem], template: str = BARE, *, blind: bool = False) -> dict[str, Tensor]:
    """Images or videos and questions as the model takes them, padded on the left.

    All items have an image, or all have a video. blind: the mean colour in every place.
    """
    videos = [item.video for item in items if item.video is not None]
    if videos and getattr(processor, "video_processor", None) is None:
        raise UserError(f"{processor.tokenizer.name_or_path or 'the model'} takes images and no videos: give a video model.")
    if videos and len(videos) < len(items):
        raise UserError("some have a video and others an image: ask about them one after the other")
    texts = [prompt(processor, template.replace("{question}", item.question), "video" if videos else "image") for item in items]
    start = processor.tokenizer.bos_token
    own_start = bool(start) and all(text.startswith(start) for text in texts)  # the template has it: not twice
    made = processor(
        text=texts,
        **(_of_videos(processor, videos, blind) if videos else _of_images(processor, items, blind)),
        padding=True,
        padding_side="left",
        add_special_tokens=not own_start,
        return_tensors="pt",
    )
    return {name: value for name, value in made.items() if isinstance(value, Tensor)}


def _of_images(processor: Any, items: Sequence[VqaItem], blind: bool) -> dict[str, Any]:
    return {"images": [grey(processor.image_processor, item.image) if blind else item.image for item in items]}


def _of_videos(processor: Any, videos: Sequence[Video], blind: bool) -> dict[str, Any]:
    """The frames as they are: none of them is left out by the processor, and it is told when they are shown."""
    from transformers.video_utils import VideoMetadata

    pixels = processor.video_processor
    seen = [[grey(pixels, frame) if blind else frame for frame in video.frames] for video in videos]
    about = [
        VideoMetadata(total_num_frames=len(video.frames), fps=video.rate, frames_indices=list(range(len(video.frames))))
        for video in videos
    ]
    return {
        "videos": [np.stack([np.asarray(frame.convert("RGB")) for frame in frames]) for frames in seen],
        "video_metadata": about,
        "do_sample_frames": False,
    }


def grey(pixels: Any, image: Image.Image) -> Image.Image:
    """A picture of that size in the colour that a processor of pixels turns into zeros: it shows nothing."""
    mean = getattr(pixels, "image_mean", None) or (0.5, 0.5, 0.5)
    red, green, blue = (round(255 * part) for part in mean)
    return Image.new("RGB", image.size, (red, green, blue))


def _fitting(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def answer(model: Any, processor: Any, inputs: Mapping[str, Tensor], max_new_tokens: int = MAX_NEW_TOKENS) -> list[str]:
    """The answer to each question, greedily decoded."""
    words = processor.tokenizer
    greedy: dict[str, Any] = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
    with torch.inference_mode():
        ids = model.generate(
            **_fitting(model, inputs), **greedy, max_new_tokens=max_new_tokens, pad_token_id=words.pad_token_id
        )
    new = ids[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in words.batch_decode(new, skip_special_tokens=True)]


def answer_questions(
    model: Any,
    processor: Any,
    items: Iterable[VqaItem],
    batch_size: int = 16,
    max_new_tokens: int = MAX_NEW_TOKENS,
    template: str = BARE,
) -> list[str]:
    """The answer to each question, in order."""
    answers: list[str] = []
    batch: list[VqaItem] = []

    def flush() -> None:
        if batch:
            inputs = {name: value.to(model.device) for name, value in ask(processor, batch, template).items()}
            answers.extend(answer(model, processor, inputs, max_new_tokens))
            batch.clear()

    for item in items:
        batch.append(item)
        if len(batch) == batch_size:
            flush()
    flush()
    return answers


def prefill(model: Any, inputs: Mapping[str, Tensor]) -> Any:
    """One pass over image and question, up to the first word of the answer."""
    return model(**_fitting(model, inputs), logits_to_keep=1)
