"""The small LLaVA before it is trained: tokenizer, processor, and the model with an open_clip vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from tokensieve.embedded import scenes
from tokensieve.embedded.recipes.tokenizer import WORDS

WIDTH, HEADS, HIDDEN = 128, 4, 256  # of the language model
PATCH = 8
CHAT = (
    "{% for message in messages %}{{ message['role'] | upper }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
PROMPT = "USER: <image>\n{question} ASSISTANT:"


def make_tokenizer(more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per word, for the words of the embedded CLIP's tokenizer, of the prompt, and more; texts start with [BOS].

    Of more words, those in angle brackets stand for something else than text.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    special = ("[PAD]", "[UNK]", "[BOS]", "[EOS]", "<image>")
    ids = {token: i for i, token in enumerate((*special, "user", "assistant", *WORDS, *more))}
    words = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    words.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    words.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", ids["[BOS]"])])
    words.decoder = decoders.WordPiece(prefix="##", cleanup=True)  # words with spaces between, none before a question mark
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        extra_special_tokens={f"{token[1:-1]}_token": token for token in ("<image>", *more) if token.startswith("<")},
        padding_side="left",
        model_max_length=512,
    )


def make_processor(mean: Sequence[float], std: Sequence[float]) -> LlavaProcessor:
    """Images as input of the tower, prompts as in LLaVA-1.5."""
    side = {"height": scenes.SIZE, "width": scenes.SIZE}
    pictures = CLIPImageProcessor(
        size={"shortest_edge": scenes.SIZE}, crop_size=side, image_mean=list(mean), image_std=list(std)
    )
    return LlavaProcessor(
        image_processor=pictures,
        tokenizer=make_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
    )


def make_model(processor: LlavaProcessor, visual: nn.Module, layers: int) -> LlavaForConditionalGeneration:
    """A LLaVA with the weights of an open_clip vision tower and an untrained language model."""
    blocks: Any = visual.transformer.resblocks  # type: ignore[union-attr]
    words = processor.tokenizer
    tower = CLIPVisionConfig(
        hidden_size=blocks[0].mlp.c_fc.in_features,
        intermediate_size=blocks[0].mlp.c_fc.out_features,
        num_hidden_layers=len(blocks),
        num_attention_heads=blocks[0].attn.num_heads,
        image_size=scenes.SIZE,
        patch_size=PATCH,
        hidden_act="gelu",
        projection_dim=blocks[0].mlp.c_fc.in_features,
    )
    language = LlamaConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    config = LlavaConfig(
        vision_config=tower,
        text_config=language,
        image_token_id=words.image_token_id,
        image_seq_length=(scenes.SIZE // PATCH) ** 2,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        projector_hidden_act="gelu",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(tower_weights(visual.state_dict()))
    for layer in model.model.language_model.layers:  # a new layer is the identity
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def spread(layers: Sequence[nn.Module], number: int) -> list[nn.Module]:
    """So many of the layers, evenly spread, the last one among them."""
    return [layers[(i + 1) * len(layers) // number - 1] for i in range(number)]


def tower_weights(visual: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an open_clip vision transformer under the names of transformers' CLIPVisionModel."""
    out = {
        "embeddings.class_embedding": visual["class_embedding"],
        "embeddings.patch_embedding.weight": visual["conv1.weight"],
        "embeddings.position_embedding.weight": visual["positional_embedding"],
    }
    names = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
    names["attn.out_proj"] = "self_attn.out_proj"
    for name, value in visual.items():
        if name.startswith("transformer.resblocks."):
            layer, rest = name.removeprefix("transformer.resblocks.").split(".", 1)
            module, kind = rest.rsplit(".", 1)
            if module == "attn":  # in_proj_weight, in_proj_bias: q, k and v in one
                for letter, third in zip("qkv", value.chunk(3), strict=True):
                    out[f"encoder.layers.{layer}.self_attn.{letter}_proj.{kind.removeprefix('in_proj_')}"] = third
            else:
                out[f"encoder.layers.{layer}.{names[module]}.{kind}"] = value
        elif name.startswith(("ln_pre", "ln_post")):
            out[name.replace("ln_pre", "pre_layrnorm").replace("ln_post", "post_layernorm")] = value
    return out
