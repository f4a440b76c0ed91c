"""Models by name without their weights: on the meta device, to check plans before anything is loaded or fetched.

Only what is on the disk is read. None: the architecture is not known without loading the model.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from tokensieve import embedded
from tokensieve.models.loading import hf as load_hf
from tokensieve.models.loading import open_clip as load_open_clip
from tokensieve.models.loading.load_errors import collect_warnings
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.registry import resolve


def outline(model: str, model_type: str) -> Any | None:
    """The bare model of that name without weights; None if it is not known here, or cannot be made so."""
    make = MODEL_TYPES.get_or_fail(model_type).outline
    if make is None:
        return None
    try:
        with torch.device("meta"), collect_warnings(), load_hf.quiet():
            return resolve(make)(model)
    except Exception:  # what is wrong with it is said where it is loaded
        return None


def of_open_clip(model: str) -> Any | None:
    embedded.register()
    if load_open_clip.needs_hub(model, ""):
        return None
    return load_open_clip.create(model, "")[0].eval()


def of_timm(model: str) -> Any | None:
    import timm

    return timm.create_model(model, pretrained=False, num_classes=0).eval() if timm.is_model(model) else None


def of_hf(model: str) -> Any | None:
    return load_hf.without_weights(model).eval() if os.path.isdir(model) else None


def of_vlm(model: str) -> Any | None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = str(embedded.llava_path(model)) if model in embedded.LLAVAS else model
    if not os.path.isdir(folder):
        return None
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return AutoModelForImageTextToText.from_config(config, trust_remote_code=False).eval()
