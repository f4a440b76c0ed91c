"""New re-identification models, with the weights of the backbone's library or the backbone of an earlier model."""

from __future__ import annotations

from torch import nn

from tokensieve.errors import UserError, one_line
from tokensieve.reid import loading
from tokensieve.reid.backbones import make_model
from tokensieve.reid.model import SHARED, ReidModel, Settings


def build(settings: Settings, pretrained: str = "", cache_dir: str | None = None) -> ReidModel:
    """A new model.

    pretrained: a tag or a file of the backbone's library; the folder (or the name) of an earlier re-identification model, whose
    backbone is taken; scenes-v1 for the first blocks of the embedded CLIP (timm); "" for random weights.
    """
    if not loading.is_model(pretrained):
        return make_model(settings, pretrained, cache_dir)
    model, earlier = make_model(settings, "", cache_dir), loading.read(pretrained)
    for name, backbone in model.backbones.items():
        source = name if name in earlier.backbones else SHARED
        if source not in earlier.backbones:
            raise UserError(f"{pretrained} has a backbone for each modality, so it cannot begin one that is shared")
        _copy_weights(backbone, earlier.backbones[source], pretrained)
    return model


def _copy_weights(backbone: nn.Module, source: nn.Module, name: str) -> None:
    try:
        backbone.load_state_dict(source.state_dict())
    except RuntimeError as error:
        reason = one_line(error, 160)
        raise UserError(f"{name}: its backbone is another one than this model's ({reason})") from None
