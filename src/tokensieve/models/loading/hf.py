"""Hugging Face models with what belongs to them, from a folder or the Hub; no code of theirs is run (no trust_remote_code).

CLIP-like models (CLIP, SigLIP, SigLIP2 and others with an image and a text tower) and bare vision models (DINOv2, DINOv3,
ViT: for linear probes). Weights are float32. Images go through the model's own processor, on Pillow where there is such a one.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tokensieve.errors import UserError, describe_value, did_you_mean, short
from tokensieve.models.loading.fingerprints import identity
from tokensieve.models.loading.hub import hub_is_reachable, is_cached, offline_message
from tokensieve.models.loading.load_errors import collect_warnings, translate_load_errors
from tokensieve.models.loading.loaded import Loaded, no_text

CLIP_L = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14}
SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
KERNELS = ("eager", "sdpa")  # of attention; all others are code
ARCHITECTURES: dict[str, tuple[str, dict[str, int]]] = {  # well-known vision towers, to be measured with random weights
    "clip-vit-base-patch32": ("CLIPVisionModelWithProjection", {"patch_size": 32}),
    "clip-vit-base-patch16": ("CLIPVisionModelWithProjection", {"patch_size": 16}),
    "clip-vit-large-patch14": ("CLIPVisionModelWithProjection", CLIP_L | {"projection_dim": 768}),
    "clip-vit-large-patch14-336": ("CLIPVisionModelWithProjection", CLIP_L | {"projection_dim": 768, "image_size": 336}),
    "siglip-base-patch16-224": ("SiglipVisionModel", {"patch_size": 16, "image_size": 224}),
    "siglip-so400m-patch14-384": ("SiglipVisionModel", SO400M | {"image_size": 384}),
    "dinov2-base": ("Dinov2Model", {"patch_size": 14, "image_size": 518}),
    "dinov2-large": ("Dinov2Model", LARGE | {"patch_size": 14, "image_size": 518}),
    "dinov3-vitb16": ("DINOv3ViTModel", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    "vit-base-patch16-224": ("ViTModel", {"patch_size": 16, "image_size": 224}),
    "vit-large-patch16-224": ("ViTModel", LARGE | {"intermediate_size": 4096, "patch_size": 16, "image_size": 224}),
}


def check_model(model: str, pretrained: str) -> None:
    """A UserError if this is no folder of a model and cannot be an id on the Hub."""
    if os.path.isdir(model):
        if pretrained:
            raise UserError(f"--pretrained {pretrained}: the folder {model} holds its own weights; leave --pretrained out.")
        if not os.path.isfile(os.path.join(model, "config.json")):
            raise UserError(f"--model {model}: there is no config.json in that folder, so it is no Hugging Face model.")
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise UserError(
            f"--model {model}: there is no such folder, and it is no id on the Hub such as openai/clip-vit-base-patch16."
        )


def load(
    model: str,
    pretrained: str,
    *,
    cache_dir: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """The model with its processor as the transform, and its tokenizer where it has a text tower."""
    check_model(model, pretrained)
    where = _where(model, pretrained, cache_dir)
    with collect_warnings() as notes, quiet(), translate_load_errors(model, pretrained):
        config = _config(model, where)
        built = _build(model, config, where).to(device=device, dtype=dtype).eval()
        transform, remark = _transform(model, config, where)
        tokenizer = _tokenizer(model, config, where) if hasattr(built, "get_text_features") else no_text(model)
    return Loaded(built, transform, tokenizer, identity(built, transform), notes + remark)


def architecture(
    model: str, pretrained: str = "", image_size: int | tuple[int, int] | None = None, cache_dir: str | None = None
) -> Any:
    """A well-known vision tower with random weights, or a model by folder or id (random weights with an image size)."""
    import transformers

    assert not isinstance(image_size, tuple)  # its configurations have square images
    size = {} if image_size is None else {"image_size": image_size}
    if model in ARCHITECTURES and not os.path.isdir(model):
        name, options = ARCHITECTURES[model]
        if pretrained:
            raise UserError(
                f"--pretrained {pretrained}: {model} has random weights here; for trained ones give a folder or an id"
            )
        kind = getattr(transformers, name)
        return kind(kind.config_class(**options | size), **_unpooled(kind.config_class.model_type))
    if not os.path.isdir(model) and "/" not in model:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"--model {model}: not a folder, a Hub id or one of {known}.{did_you_mean(model, ARCHITECTURES)}")
    check_model(model, pretrained)
    where = _where(model, pretrained, cache_dir)
    with collect_warnings(), quiet(), translate_load_errors(model, pretrained):
        config = _config(model, where)
        if image_size is None:
            return _build(model, config, where)
        vision = getattr(config, "vision_config", config)
        vision.image_size = image_size
        if config.model_type.startswith("siglip2"):
            vision.num_patches = (image_size // vision.patch_size) ** 2
        return _from_config(config)


def without_weights(folder: str) -> Any:
    """The model of a folder with random weights."""
    return _from_config(_config(folder, _where(folder, "", None)))


def _from_config(config: Any) -> Any:
    import transformers

    named = _named(config)
    if named is not None:
        return named._from_config(config, dtype=torch.float32)
    return transformers.AutoModel.from_config(config, dtype=torch.float32, **_unpooled(config.model_type))


def backbone(
    model: str, pretrained: str, cache_dir: str | None, config: dict[str, Any]
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The vision part of a model, and its configuration; from that alone, with random weights, where it is given."""
    import transformers

    if config:
        _check_kernels(model, config)
        with quiet(), translate_load_errors(model, pretrained):
            made = transformers.AutoConfig.for_model(**config)
            kind = getattr(transformers, (made.architectures or [""])[0], transformers.AutoModel)
            if not issubclass(kind, transformers.PreTrainedModel):
                kind = transformers.AutoModel
            options = _unpooled(made.model_type)
            make = kind._from_config if kind is not transformers.AutoModel else kind.from_config
            return _without_text(make(made, dtype=torch.float32, **options)), config
    if model in ARCHITECTURES and not os.path.isdir(model):
        found = architecture(model, pretrained)
    else:
        check_model(model, pretrained)
        where = _where(model, pretrained, cache_dir)
        with quiet(), translate_load_errors(model, pretrained):
            found = _build(model, _config(model, where), where)
    made = found.config.to_dict() | {"architectures": [type(found).__name__], "model_type": found.config.model_type}
    return _without_text(found), json.loads(json.dumps(made, default=str))


def _check_kernels(model: str, config: dict[str, Any]) -> None:
    """A UserError if a configuration, or one inside it, names kernels that transformers would fetch and run."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_kernels(model, value)
        elif key.endswith("_implementation") and value not in (None, *KERNELS):
            raise UserError(f"{short(model)}: {short(key)} is one of {', '.join(KERNELS)}, not {describe_value(value)}")


def _without_text(model: Any) -> Any:
    for name in ("text_model", "text_projection"):
        if hasattr(model, name):
            delattr(model, name)
    return model


def _where(model: str, pretrained: str, cache_dir: str | None) -> dict[str, Any]:
    """How to find the files; a UserError if they are on the Hub, and it cannot be reached."""
    if os.path.isdir(model):
        return {"local_files_only": True}
    online = hub_is_reachable()
    if not online and not is_cached(model, "config.json", cache_dir, pretrained or None):
        hint = f" Only bench knows {model!r} without a download." if model in ARCHITECTURES else ""
        raise UserError(
            f"the model {model} is {offline_message()}. Connect once, or give a folder: --model /path/to/model.{hint}"
        )
    return {"local_files_only": not online, "cache_dir": cache_dir, "revision": pretrained or "main"}


def _config(model: str, where: dict[str, Any]) -> Any:
    """The configuration; a UserError unless it is of a model that makes features of images."""
    from transformers import MODEL_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False, **where)
    kind = MODEL_MAPPING.get(type(config), None)
    both = hasattr(kind, "get_image_features") and hasattr(kind, "get_text_features")
    if not both and getattr(kind, "main_input_name", "") != "pixel_values":
        raise UserError(
            f"{model} is a {config.model_type}, which makes no features of images; "
            "give a CLIP-like model (CLIP, SigLIP) or a vision model (DINOv2, DINOv3, ViT)."
        )
    return config


def _unpooled(model_type: str) -> dict[str, bool]:
    """ViT's pooler is not trained in most checkpoints, and not part of its feature."""
    return {"add_pooling_layer": False} if model_type in ("vit", "deit") else {}


def _named(config: Any) -> Any:
    """The class of transformers that the config names, where AutoModel would leave its projection out; else None."""
    import transformers

    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None) if name.endswith("VisionModelWithProjection") else None
    return kind if kind is not None and kind.config_class is type(config) and not hasattr(config, "text_config") else None


def _build(model: str, config: Any, where: dict[str, Any]) -> Any:
    from transformers import AutoModel

    kind, options = _named(config) or AutoModel, _unpooled(config.model_type)
    built, report = kind.from_pretrained(
        model, config=config, dtype=torch.float32, trust_remote_code=False, output_loading_info=True, **where, **options
    )
    lacking = sorted(name for name in report["missing_keys"] if not name.endswith("mask_token"))  # used in training only
    if lacking:
        raise UserError(
            f"the weights of {model} lack {len(lacking)} tensors, which would be random: {', '.join(lacking[:3])} ..."
        )
    unused = sorted(report["unexpected_keys"])
    if unused:
        more = " ..." if len(unused) > 3 else ""
        warnings.warn(f"{type(built).__name__} does not use {', '.join(unused[:3])}{more} of {model}", stacklevel=2)
    return built


def _transform(model: str, config: Any, where: dict[str, Any]) -> tuple[Callable[[Any], Tensor], list[str]]:
    """A Pillow image -> (3, h, w), and notes about it."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(model, backend="pil", trust_remote_code=False, **where)
    if config.model_type.startswith("siglip2"):
        vision = getattr(config, "vision_config", config)
        side = int(vision.num_patches**0.5) * vision.patch_size
        square = {"size": {"height": side, "width": side}, "resample": processor.resample, "do_convert_rgb": True}
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        processor = SiglipImageProcessorPil(image_mean=processor.image_mean, image_std=processor.image_std, **square)
        note = f"{model} takes images of any shape; here all are resized to {side} x {side}"
        return Transform(processor), [note]
    return Transform(processor), []


class Transform:
    """A processor as a function of one image; it can be sent to worker processes."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, image: Any) -> Tensor:
        pixels: Tensor = self.processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        return pixels

    def __repr__(self) -> str:
        return f"Transform({self.processor!r})"


def _tokenizer(model: str, config: Any, where: dict[str, Any]) -> Callable[[list[str]], Any]:
    """Texts -> BatchEncoding. SigLIP was trained on lower-case texts, padded to full length, without a mask."""
    from transformers import AutoTokenizer
    from transformers.tokenization_utils_base import LARGE_INTEGER

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False, **where)
    if 2 * len(tokenizer) < config.text_config.vocab_size:  # without its files, transformers makes an empty one
        raise UserError(
            f"the tokenizer of {model} knows {len(tokenizer)} of {config.text_config.vocab_size} tokens: "
            "its files (tokenizer.json, or vocab.json and merges.txt) are missing."
        )
    known = (getattr(config.text_config, "max_position_embeddings", None), tokenizer.model_max_length)
    longest = min((length for length in known if length and 0 < length < LARGE_INTEGER), default=None)  # None: any length
    siglip = config.model_type.startswith("siglip")

    def tokenize(texts: list[str]) -> Any:
        texts = [texts] if isinstance(texts, str) else list(texts)
        words = [text.lower() for text in texts] if siglip else texts
        padding = "max_length" if siglip else True
        tokens = tokenizer(words, padding=padding, truncation=longest is not None, max_length=longest, return_tensors="pt")
        if siglip:
            tokens.pop("attention_mask", None)
        return tokens

    return tokenize


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers while it loads."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
