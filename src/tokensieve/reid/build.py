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


def start_from(model: ReidModel, name: str) -> None:
    """Copies the weights of an earlier model: everything that both have, but for classifiers of other identities."""
    earlier, own = loading.read(name), model.state_dict()
    about = [(each.settings.data, each.settings.val_identities, each.settings.identities) for each in (earlier, model)]
    same = about[0] == about[1]
    weights = {key: value for key, value in earlier.state_dict().items() if same or ".classifier." not in key}
    for key, value in weights.items():
        if key in own and own[key].shape != value.shape:
            shapes = f"{tuple(value.shape)}, not {tuple(own[key].shape)}"
            raise UserError(f"{name}: its {key} is {shapes}; train from a model with the same backbone, images and cameras")
    model.load_state_dict(weights, strict=False)


def _copy_weights(backbone: nn.Module, source: nn.Module, name: str) -> None:
    try:
        backbone.load_state_dict(source.state_dict())
    except RuntimeError as error:
        reason = one_line(error, 160)
        raise UserError(f"{name}: its backbone is another one than this model's ({reason})") from None
