"""A re-identification model as a family: the tower of its backbone, with the model's head at @out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.models.registry import open_tower as open_any
from tokensieve.models.resizing import Resizing
from tokensieve.models.tower import Entry, Layout, Sizes, Tower, Undo
from tokensieve.reid.model import ReidModel


def open_tower(model: nn.Module) -> Tower | None:
    """The tower of a ReidModel, whose @out is its head; None if it is none."""
    if not isinstance(model, ReidModel):
        return None
    towers = {name: open_any(backbone) for name, backbone in model.backbones.items()}
    first = next(iter(towers.values()))

    def on_layout(set_layout: Callable[[Layout], None]) -> list[Undo]:
        return [undo for tower in towers.values() for undo in tower.on_layout(set_layout)]

    def patch_pooling(sizes: Sizes) -> list[Undo]:
        inner = [undo for tower in towers.values() for undo in tower.patch_pooling(sizes)] if model.settings.shared else []
        return [*inner, model.weigh(sizes)]

    def resize(resizing: Resizing) -> list[Undo]:
        return [undo for tower in towers.values() if tower.resize is not None for undo in tower.resize(resizing)]

    def check() -> None:
        for tower in towers.values():
            tower.check()

    def expand_sample_ids(samples: Tensor, context: Mapping[str, Any]) -> Tensor:
        """Each image of an object has its own number, whichever modalities are present."""
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
        on_layout=on_layout,
        patch_pooling=patch_pooling,
        head=model.head,
        head_width=model.width,
        no_blocks_reason="" if model.settings.shared else "every modality has a backbone of its own, so none can be cut inside",
        entries=[
            Entry(model, "features", context=modalities, runs_all=True),
            *(
                entry if entry.kind == "head" else replace(entry, kind="part", runs_all=False)
                for tower in towers.values()
                for entry in tower.entries
            ),
        ],
        signed_layers=[block.module for tower in towers.values() for block in tower.blocks],
        own_parts=dict(model.parts.items()),
        resize=resize if all(tower.resize for tower in towers.values()) else None,
        expand_sample_ids=expand_sample_ids,
    )
