"""The config of a model that is to be served, read before vLLM starts: from a folder, or from the Hugging Face Hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokensieve.embedded import LLAVA, llava_path
from tokensieve.errors import UserError, one_line, short


def find_model(name: str) -> str:
    """The folder of an embedded model, the path of a user's, or the name of one on the Hub."""
    if name == LLAVA:
        return str(llava_path())
    if os.path.isdir(name):
        return os.path.abspath(name)
    if os.path.exists(name):
        raise UserError(f"{short(name)} is a file; give the folder of a model")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"there is no folder {short(name)}; give the folder of a model, OWNER/NAME on the Hub, or {LLAVA}")
    return name


def read_config(model: str) -> dict[str, Any]:
    """The config.json of a model; a UserError if there is none."""
    path = Path(model) / "config.json" if os.path.isdir(model) else _from_hub(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error, 200)
        raise UserError(f"{path} cannot be read: {reason}; a folder of a model has a config.json") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is not the config of a model")
    return config


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # many kinds, of several libraries
        raise UserError(
            f"{short(model)} is no folder, and its config.json cannot be read from the Hugging Face Hub: {one_line(error, 200)}"
        ) from error
