"""The shape of a vision-language model before it is loaded: from its config.json, or as published."""

from __future__ import annotations

import os
from pathlib import Path

from tokensieve import embedded
from tokensieve.files import read_json

PUBLISHED = {  # vision tokens per image, layers of the language model
    "llava-hf/llava-1.5-7b-hf": (576, 32),
    "llava-hf/llava-1.5-13b-hf": (576, 40),
    "llava-hf/bakLlava-v1-hf": (576, 32),
}
MAX_SHAPE = 10**6  # of what a config.json may say


def model_shape(name: str, cache_dir: str | None = None) -> tuple[int, int] | None:
    """Vision tokens per image and layers of the language model, of a LLaVA; None: not known yet.

    name: the embedded LLaVA, a folder, or an id on the Hub, which may have been downloaded before. Nothing is downloaded.
    """
    path = _config_file(name, cache_dir)
    if path is None or not path.is_file():
        return PUBLISHED.get(name)
    try:
        config = read_json(path)
        if config.get("model_type", "llava") != "llava":  # the number of tokens may vary
            return None
        shape = config["image_seq_length"], config["text_config"]["num_hidden_layers"]
    except (ValueError, KeyError, TypeError, AttributeError):  # another family, or a broken file: reported when it is loaded
        return PUBLISHED.get(name)
    return shape if all(isinstance(number, int) and 0 < number <= MAX_SHAPE for number in shape) else None


def _config_file(name: str, cache_dir: str | None) -> Path | None:
    if name == embedded.LLAVA:
        return embedded.llava_path() / "config.json"
    if os.path.isdir(name):  # also False for what cannot be a path
        return Path(name) / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", cache_dir=cache_dir)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
