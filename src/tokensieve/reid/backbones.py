"""Backbones of re-identification models, from open_clip, timm or Hugging Face, and a new model on them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch import nn

from tokensieve import embedded
from tokensieve.errors import UserError
from tokensieve.models.loading import hf as load_hf
from tokensieve.models.loading import load_errors
from tokensieve.models.loading import open_clip as load_open_clip
from tokensieve.models.loading import timm as load_timm
from tokensieve.reid.model import SHARED, ReidModel, Settings


def make_model(settings: Settings, pretrained: str = "", cache_dir: str | None = None) -> ReidModel:
    """A new model. pretrained: a tag or a file of the backbone's library, "" for random weights."""
    if len(set(settings.modalities)) != len(settings.modalities) or not settings.modalities:
        raise UserError(f"modalities: {list(settings.modalities)}: name each once, one at least")
    if settings.backbone.startswith(load_open_clip.SCHEMAS):
        raise UserError(f"{settings.backbone} brings its own weights; give the name of its architecture, and them as a file")
    if settings.library == "timm" and "." in settings.backbone:  # a saved model names no weights: they would be fetched again
        load_timm.check_model(settings.backbone, pretrained)
        name, _, pretrained = settings.backbone.partition(".")
        settings = replace(settings, backbone=name)
    backbones = {}
    with load_errors.collect_warnings() as notes:
        for name in (SHARED,) if settings.shared else settings.modalities:
            backbones[name], arguments = make_backbone(settings, pretrained, cache_dir)
            settings = replace(settings, arguments=arguments)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return ReidModel(settings, backbones)


def make_backbone(settings: Settings, pretrained: str, cache_dir: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """A vision transformer for images of this size, its position embeddings interpolated where it was trained for another
    one; and the arguments that make it again."""
    arguments = dict(settings.arguments)
    if settings.library == "open_clip":
        load_open_clip.check_model(settings.backbone, pretrained)
        try:
            made, _ = load_open_clip.create(settings.backbone, pretrained, cache_dir, settings.image_size)
        except AssertionError as error:  # open_clip's error for fixed position embeddings that are square
            raise UserError(f"{settings.backbone} cannot have images of {settings.image_size}: {error}") from error
        return made.visual, arguments
    if settings.library == "timm":
        ours = pretrained == embedded.PRETRAINED  # of the embedded CLIP, in open_clip's format
        load_timm.check_model(settings.backbone, "" if ours else pretrained)
        size = settings.image_size
        built = load_timm.create(settings.backbone, "" if ours else pretrained, cache_dir, size, **arguments)
        if ours:
            head = embedded.architecture()["vision_cfg"]["head_width"]
            load_timm.take_clip(built, str(embedded.weights_path(pretrained)), head)
        return built, arguments
    if settings.library == "hf":
        return load_hf.backbone(settings.backbone, pretrained, cache_dir, arguments)
    raise UserError(f"library {settings.library!r} is not one of open_clip, timm, hf")
