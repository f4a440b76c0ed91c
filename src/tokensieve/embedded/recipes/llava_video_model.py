"""The small video model before it is trained: a LLaVA-OneVision with the parts of the embedded LLaVA, and a few more words."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlavaForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
)

from tokensieve.embedded import scenes
from tokensieve.embedded.recipes.llava_model import make_tokenizer, spread

# The words of the questions about clips that the LLaVA does not know, each with a known one whose meaning is close: it begins
# with its embedding. Others begin at random.
NEW_WORDS = {
    "up": "above",
    "down": "below",
    "zero": "no",
    **dict.fromkeys(("way", "does", "move", "appear", "appears", "vanish", "stay"), ""),
    **dict.fromkeys(("first", "when", "early", "middle", "late", "start", "end"), ""),
}
VIDEO = "<video>"
PROMPT = "USER: <video>\n{question} ASSISTANT:"
POSITIONS = 4096  # places in a sequence: a clip of 80 frames
CHAT = (
    "{% for message in messages %}{{ message['role'] | upper }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'video') %}<{{ part['type'] }}>\n{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def make_processor(of_images: LlavaProcessor) -> LlavaOnevisionProcessor:
    """Clips as input of the tower, prompts as in LLaVA-1.5."""
    side = {"height": scenes.SIZE, "width": scenes.SIZE}
    words = make_tokenizer((*NEW_WORDS, VIDEO))
    words.model_max_length = POSITIONS
    pixels = {
        "size": side,
        "image_mean": of_images.image_processor.image_mean,
        "image_std": of_images.image_processor.image_std,
    }
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(image_grid_pinpoints=[[scenes.SIZE, scenes.SIZE]], **pixels),
        tokenizer=words,
        video_processor=LlavaOnevisionVideoProcessor(**pixels),
        num_image_tokens=(scenes.SIZE // of_images.patch_size) ** 2 + 1,  # with CLS
        vision_feature_select_strategy="default",
        chat_template=CHAT,
    )


def make_model(
    processor: LlavaOnevisionProcessor, llava: LlavaForConditionalGeneration, known: LlavaProcessor, layers: int
) -> LlavaOnevisionForConditionalGeneration:
    """A LLaVA-OneVision with the weights of a LLaVA, of which so many layers, and embeddings for the words of the processor."""
    words, old = processor.tokenizer, llava.config
    language: Any = old.text_config.to_dict() | {
        "vocab_size": len(words),
        "max_position_embeddings": POSITIONS,
        "num_hidden_layers": layers,
    }
    config = LlavaOnevisionConfig(
        vision_config=old.vision_config,
        text_config=type(old.text_config)(**language),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        video_token_index=words.convert_tokens_to_ids(VIDEO),
        vision_feature_layer=old.vision_feature_layer,
        vision_feature_select_strategy=old.vision_feature_select_strategy,
        projector_hidden_act=old.projector_hidden_act,
        image_grid_pinpoints=[[scenes.SIZE, scenes.SIZE]],
        tie_word_embeddings=True,
    )
    model = LlavaOnevisionForConditionalGeneration(config)
    new, parts = model.model, llava.model
    new.vision_tower.load_state_dict(parts.vision_tower.state_dict())
    new.multi_modal_projector.load_state_dict(parts.multi_modal_projector.state_dict())
    for layer, taken in zip(new.language_model.layers, spread(parts.language_model.layers, layers), strict=True):
        layer.load_state_dict(taken.state_dict())
    new.language_model.norm.load_state_dict(parts.language_model.norm.state_dict())
    with torch.no_grad():
        table, rows = new.language_model.embed_tokens.weight, parts.language_model.embed_tokens.weight
        for word, number in words.get_vocab().items():
            like = NEW_WORDS.get(word, word) or word
            if like in known.tokenizer.get_vocab():
                table[number] = rows[known.tokenizer.convert_tokens_to_ids(like)]
    return model
