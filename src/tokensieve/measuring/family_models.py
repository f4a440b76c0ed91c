"""Vision-language models of every family, of random weights and of one width, and a prompt of about so many image tokens.

They are the tiny models of `tokensieve families` with a wider language model. Their towers stay tiny.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokensieve.errors import UserError, did_you_mean, short
from tokensieve.models.families import VLM_FAMILIES
from tokensieve.testing import tiny_vlms
from tokensieve.testing.tiny_vlms import IMAGE

PATCH = 4  # pixels
TILE = 8  # tokens of a side of the tiles of families that cut images into many
HEAD = 64  # width
WORDS = tuple(range(10, 40))  # the question, as ids
MARK, END = 61, 60  # ids around images
Inputs = dict[str, Tensor]
# models of other kinds in these families; not PaliGemma 2, whose eager attention has no oracle
OTHERS: dict[str, Callable[[], tuple[Any, Inputs]]] = {"pixtral": partial(tiny_vlms.pixtral, merge=1)}


def names() -> list[str]:
    """The families that can be cut, and models of other kinds in them."""
    return [*(family.name for family in VLM_FAMILIES.values() if not family.no_cut), *OTHERS]


def check(name: str) -> str:
    """The name of a family that can be cut; a UserError for any other."""
    if name not in names():
        reason = f" ({VLM_FAMILIES[name].no_cut})" if name in VLM_FAMILIES else did_you_mean(name, names())
        raise UserError(f"--family {short(name)}: all, or some of {', '.join(names())}.{reason}")
    return name


def build(name: str, tokens: int, width: int) -> tuple[Any, Inputs]:
    """A model of a family, and a prompt with an image (or images, or tiles) of about so many tokens."""
    tiny, _ = OTHERS[name]() if name in OTHERS else tiny_vlms.model_and_inputs(name)
    config = copy.deepcopy(tiny.config)
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.head_dim = width, width * 8 // 3, HEAD
    text.num_attention_heads, text.num_key_value_heads = width // HEAD, max(1, width // HEAD // 4)
    text.max_position_embeddings = 4 * tokens + 1024
    if getattr(text, "sliding_window", None):
        text.sliding_window = text.max_position_embeddings
    for owner, attribute in ((vision, "out_hidden_size"), (vision, "projection_dim"), (config, "projection_dim")):
        if hasattr(owner, attribute):
            setattr(owner, attribute, width)
    if getattr(text, "query_pre_attn_scalar", None):
        text.query_pre_attn_scalar = HEAD
    made = MAKERS.get(name, _qwen)(config, tokens)
    torch.manual_seed(0)
    model = type(tiny)(config).eval()
    model.generation_config.eos_token_id = None
    return model, made(model) if callable(made) else made


def _square(tokens: int) -> int:
    return max(2, math.isqrt(tokens))


def _tiles(tokens: int) -> int:
    return max(2, tokens // TILE**2)


def _prompt(*image: int, **more: Tensor) -> Inputs:
    """A prompt with the ids of an image between words."""
    ids = torch.tensor([[1, 7, *image, 9, *WORDS]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _llava(config: Any, tokens: int) -> Inputs:
    side = _square(tokens)
    config.vision_config.image_size, config.image_seq_length = PATCH * side, side**2
    return _prompt(*[IMAGE] * side**2, pixel_values=_noise(1, 3, PATCH * side, PATCH * side))


def _paligemma(config: Any, tokens: int) -> Inputs:
    made = _llava(config, tokens)
    ids = made["input_ids"]
    return made | {"input_ids": ids[:, 2:], "attention_mask": made["attention_mask"][:, 2:], "token_type_ids": 0 * ids[:, 2:]}


def _in_tiles(config: Any, tokens: int) -> Callable[[Any], Inputs]:
    """LLaVA-NeXT and OneVision: 2 x 2 tiles and the image made small."""
    pixels = PATCH * max(2, 2 * (math.isqrt(tokens // 5) // 2))
    config.vision_config.image_size, config.image_grid_pinpoints = pixels, [[2 * pixels, 2 * pixels]]
    image = {"pixel_values": _noise(1, 5, 3, pixels, pixels), "image_sizes": torch.tensor([[2 * pixels, 2 * pixels]])}

    def made(model: Any) -> Inputs:
        with torch.no_grad():
            features = model.model.get_image_features(**image, return_dict=True).pooler_output
        return _prompt(*[IMAGE] * len(features[0]), **image)

    return made


def _qwen(config: Any, tokens: int) -> Inputs:
    side, vision = _square(tokens), config.vision_config
    if config.model_type == "qwen2_vl":
        vision.hidden_size = config.text_config.hidden_size
    if config.model_type == "qwen3_vl":
        vision.num_position_embeddings = 64
    config.text_config.rope_parameters["mrope_section"] = [8, 12, 12]
    patches = vision.spatial_merge_size * side
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, patches, patches]])
    made = _prompt(MARK, *[IMAGE] * side**2, END, pixel_values=_noise(patches**2, pixels), image_grid_thw=grid)
    return made | {"mm_token_type_ids": (made["input_ids"] == IMAGE).int()}


def _internvl(config: Any, tokens: int) -> Inputs:
    tiles, pixels = _tiles(tokens), 2 * PATCH * TILE
    config.vision_config.image_size, config.image_seq_length = [pixels, pixels], TILE**2
    return _prompt(MARK, *[IMAGE] * tiles * TILE**2, END, pixel_values=_noise(tiles, 3, pixels, pixels))


def _idefics(config: Any, tokens: int) -> Inputs:
    """Idefics3 and SmolVLM: a mark and a place before each tile, the last of which is the whole image."""
    tiles, pixels = _tiles(tokens), 2 * PATCH * TILE
    config.vision_config.image_size = pixels
    ids = [token for _ in range(tiles) for token in (MARK, 40, *[IMAGE] * TILE**2)]
    return _prompt(*ids, MARK, pixel_values=_noise(1, tiles, 3, pixels, pixels))


def _gemma3(config: Any, tokens: int) -> Inputs:
    images, pixels = _tiles(tokens), 2 * PATCH * TILE
    config.vision_config.image_size, config.mm_tokens_per_image = pixels, TILE**2
    made = _prompt(*[MARK, *[IMAGE] * TILE**2, END] * images, pixel_values=_noise(images, 3, pixels, pixels))
    return made | {"token_type_ids": (made["input_ids"] == IMAGE).long()}


def _mistral3(config: Any, tokens: int) -> Inputs:
    """Mistral 3 and Pixtral: a break after each row of tokens but the last."""
    side, merge = _square(tokens), getattr(config, "spatial_merge_size", 1)
    pixels = PATCH * merge * side
    config.vision_config.image_size = pixels
    ids = [token for _ in range(side) for token in (*[IMAGE] * side, MARK)][:-1]
    return _prompt(*ids, END, pixel_values=_noise(1, 3, pixels, pixels), image_sizes=torch.tensor([[pixels, pixels]]))


MAKERS: dict[str, Callable[[Any, int], Any]] = {
    "llava": _llava,
    "llava_next": _in_tiles,
    "llava_onevision": _in_tiles,
    "internvl": _internvl,
    "idefics3": _idefics,
    "smolvlm": _idefics,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "mistral3": _mistral3,
    "pixtral": _mistral3,
}
