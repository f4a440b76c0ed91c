"""TODO docstring."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve import embedded
from tokensieve.errors import UserError, one_line
from tokensieve.models.loading import hf as load_hf
from tokensieve.models.loading import load_errors
from tokensieve.models.loading import open_clip as load_open_clip
from tokensieve.models.loading import timm as load_timm
from tokensieve.models.registry import open_tower as open_any
from tokensieve.models.tower import Entry, Sizes, Tower, Undo
from tokensieve.reid.model import SHARED, ReidModel, Settings


def build(settings: Settings, pretrained: str = "", cache_dir: str | None = None) -> ReidModel:
    """A new model. pretrained: a tag or a file of the backbone's library, the folder (or the name) of an earlier model of ours
    whose backbone is taken, scenes-v1 for the first blocks of the embedded CLIP (timm), "" for random weights."""
    from tokensieve.reid import loading

    if len(set(settings.modalities)) != len(settings.modalities) or not settings.modalities:
        raise UserError(f"modalities: {list(settings.modalities)}: name each once, one at least")
    earlier = pretrained if loading.is_model(pretrained) else ""
    if settings.backbone.startswith(load_open_clip.SCHEMAS):
        raise UserError(f"{settings.backbone} brings its own weights; give the name of its architecture, and them as a file")
    if settings.library == "timm" and "." in settings.backbone:  # what is saved names no weights, which would be fetched again
        load_timm.check_model(settings.backbone, pretrained)
        name, _, pretrained = settings.backbone.partition(".")
        settings = replace(settings, backbone=name)
    names = (SHARED,) if settings.shared else settings.modalities
    backbones = {}
    with load_errors.collect_warnings() as notes:
        for name in names:
            backbones[name], arguments = make_backbone(settings, "" if earlier else pretrained, cache_dir)
            settings = replace(settings, arguments=arguments)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    model = ReidModel(settings, backbones)
    if earlier:
        before = loading.read(earlier)
        for name in names:
            theirs = name if name in before.backbones else SHARED
            if theirs not in before.backbones:
                raise UserError(f"{earlier} has a backbone for each modality, so it cannot begin one that is shared")
            _take(model.backbones[name], before.backbones[theirs], earlier)
    return model


def _take(mine: nn.Module, theirs: nn.Module, name: str) -> None:
    try:
        mine.load_state_dict(theirs.state_dict())
    except RuntimeError as error:
        told = one_line(error, 160)
        raise UserError(f"{name}: its backbone is another one than this model's ({told})") from None


def make_backbone(settings: Settings, pretrained: str, cache_dir: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """A vision transformer for images of this size, its position embeddings interpolated where it was trained for another
    one; and the arguments that make it again."""
    arguments = dict(settings.arguments)
    if settings.library == "open_clip":
        load_open_clip.check_model(settings.backbone, pretrained)
        try:
            made, _ = load_open_clip.create(settings.backbone, pretrained, cache_dir, settings.image_size)
        except AssertionError as error:  # open_clip's word for fixed position embeddings that are square
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


def open_tower(model: nn.Module) -> Tower | None:
    """The tower of a ReidModel, whose @out is its head; None if it is none."""
    if not isinstance(model, ReidModel):
        return None
    towers = {name: open_any(backbone) for name, backbone in model.backbones.items()}
    first = next(iter(towers.values()))

    def watch(tell: Any) -> list[Undo]:
        return [undo for tower in towers.values() for undo in tower.on_layout(tell)]

    def patch_pooling(sizes: Sizes) -> list[Undo]:
        inner = [undo for tower in towers.values() for undo in tower.patch_pooling(sizes)] if model.settings.shared else []
        return [*inner, model.weigh(sizes)]

    def check() -> None:
        for tower in towers.values():
            tower.check()

    def expand_sample_ids(samples: Tensor, context: Mapping[str, Any]) -> Tensor:
        """An object's images have numbers of their own, the same whichever modalities are there."""
        order = torch.tensor([model.modalities.index(name) for name in context["modalities"]], device=samples.device)
        return (samples[None] * len(model.modalities) + order[:, None]).flatten()

    def modalities(inputs: Mapping[str, Tensor]) -> Mapping[str, Any]:
        return {"modalities": model.modalities_of(inputs)}

    return replace(
        first,
        family=f"re-identification on {first.family}",
        blocks=first.blocks if model.settings.shared else [],
        grid=model.grid,
        image_size=model.settings.image_size,
        pools_cls=False,
        check=check,
        on_layout=watch,
        patch_pooling=patch_pooling,
        head=model.head,
        head_width=model.width,
        no_blocks_reason="" if model.settings.shared else "every modality has a backbone of its own, so none can be cut inside",
        entries=[
            Entry(model, "features", context=modalities),
            *(
                entry if entry.kind == "head" else replace(entry, kind="part")
                for tower in towers.values()
                for entry in tower.entries
            ),
        ],
        expand_sample_ids=expand_sample_ids,
    )
