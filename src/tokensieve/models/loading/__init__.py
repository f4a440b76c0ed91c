"""Models by name, whatever library they come from. This module imports no torch; the types are declared in registry.py.

Without a network a miss on the Hub is retried for up to 46 seconds. So weights are looked for on the disk first, and the Hub is
contacted only if a connection to it opens.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tokensieve.errors import UserError, did_you_mean
from tokensieve.files import read_lines
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.registry import resolve

if TYPE_CHECKING:
    import torch

    from tokensieve.models.loading.loaded import Loaded


def model_pairs(
    model: list[str] | None, pretrained: list[str] | None, pretrained_model: list[str] | None, model_type: str = "open_clip"
) -> list[tuple[str, str]]:
    """(model, weights) of every run: --pretrained_model if given, else every --model with every --pretrained."""
    kind = MODEL_TYPES.get_or_fail(model_type)
    if pretrained_model:
        if not kind.takes_pairs:
            raise UserError(f"--pretrained_model names open_clip models; with --model_type {model_type} use --model.")
        return [pair for name in pretrained_model for pair in _read_pairs(name)]
    models = model or ([kind.default_model] if kind.default_model else [])
    if not models:
        raise UserError(f"--model_type {model_type} needs --model, for example {kind.example}")
    default = resolve(kind.default_pretrained) if kind.default_pretrained else lambda model: ""
    return [(m, p) for m in models for p in pretrained or [default(m)]]


def _read_pairs(name: str) -> list[tuple[str, str]]:
    """What --pretrained_model names: MODEL,WEIGHTS, a text file of such lines, or a collection of clip_benchmark's."""
    from clip_benchmark.model_collection import model_collection

    if os.path.isfile(name):
        lines = read_lines(name, "--pretrained_model")
        return [_pair(line, f"{name}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if name in model_collection:
        return list(model_collection[name])
    return [_pair(name, "--pretrained_model", list(model_collection))]


def _pair(text: str, where: str, collections: list[str] | None = None) -> tuple[str, str]:
    fields = [field.strip() for field in text.split(",")]
    if len(fields) != 2:
        kinds = f", a text file, or one of {', '.join(collections)}" if collections else ""
        hint = did_you_mean(text, collections or [])
        raise UserError(f"{where}: {text!r} is not MODEL,WEIGHTS such as ViT-B-32,openai{kinds}.{hint}")
    return fields[0], fields[1]


def check_model(model: str, pretrained: str, model_type: str = "open_clip") -> None:
    """A UserError if there is no such model or no such weights for it; nothing is loaded."""
    resolve(MODEL_TYPES.get_or_fail(model_type).check)(model, pretrained)


def load(
    model: str,
    pretrained: str,
    *,
    model_type: str = "open_clip",
    cache_dir: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """The model by its name, with its transform and tokenizer, in evaluation mode on the device.

    dtype: the number format of the weights; None: float32, for vision-language models on a GPU the format they were saved in.
    """
    kind = MODEL_TYPES.get_or_fail(model_type)
    loaded: Loaded = resolve(kind.load)(model, pretrained=pretrained, cache_dir=cache_dir, device=device, dtype=dtype)
    return loaded


def architecture(
    model: str,
    pretrained: str = "",
    image_size: int | tuple[int, int] | None = None,
    model_type: str = "open_clip",
    cache_dir: str | None = None,
) -> Any:
    """The bare model by its name: no tokenizer, random weights if none are named, any image size."""
    kind = MODEL_TYPES.get_or_fail(model_type)
    if kind.architecture is None:
        *others, last = (other.name for other in MODEL_TYPES.values() if other.architecture)
        raise UserError(f"--model_type {model_type} has no architectures to measure; use {', '.join(others)} or {last}.")
    return resolve(kind.architecture)(model, pretrained, image_size, cache_dir)
