"""Signatures of models: by which a trained part recognises the model it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tokensieve.models.registry import open_tower, open_vlm
from tokensieve.models.tower import Tower
from tokensieve.plan import Where

SIGNED = ("tower", "decoder")  # what of a model is signed


def model_signature(model: nn.Module) -> dict[str, list[float | None]]:
    """Norms of the layers of tower and decoder, which differ between models, whatever number format their weights have."""
    vlm = open_vlm(model)
    tower = vlm.tower if vlm else open_tower(model)
    signed = {"tower": layer_norms([] if tower is None else _signed_layers(tower))}
    return signed | {"decoder": layer_norms(vlm.decoder.layers)} if vlm else signed


def _signed_layers(tower: Tower) -> Sequence[nn.Module]:
    return [block.module for block in tower.blocks] if tower.signed_layers is None else tower.signed_layers


def layer_norms(layers: Sequence[nn.Module]) -> list[float | None]:
    """The norm of each layer's weights; None where they are quantised or not in memory."""
    norms: list[float | None] = []
    for layer in layers:
        parameters = [p.detach() for p in layer.parameters()]
        if any(p.is_meta or not p.is_floating_point() for p in parameters):
            norms.append(None)
            continue
        kinds = [torch.float32 if p.device.type == "mps" else torch.float64 for p in parameters]  # mps has no float64
        squares = sum(float(torch.linalg.vector_norm(p, dtype=kind)) ** 2 for p, kind in zip(parameters, kinds, strict=True))
        norms.append(round(squares**0.5, 4))
    return norms


def model_name(model: nn.Module) -> str:
    """What a model is called: the folder or the id it was loaded from, else its class."""
    return getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__


def signatures_match(here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """Whether a model with the signature `here` is the one that was signed there (its decoder only if it was)."""
    for of in SIGNED:
        if of not in there:
            continue
        mine, theirs = here.get(of), there[of]
        if mine is None or len(mine) != len(theirs):
            return False
        known = [(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None]
        if not all(abs(a - b) <= 2e-3 * abs(b) for a, b in known):  # NaN is no match
            return False
    return True


def token_width(tower: Tower) -> int:
    """D of the tokens (B, N, D): what the last linear map of a block gives."""
    *_, last = (module for module in tower.blocks[0].module.modules() if isinstance(module, nn.Linear))
    return last.out_features


def width_at(where: Where, model: nn.Module) -> int | None:
    """D of the tokens that a step at this position sees; None if the model has no such position."""
    vlm = open_vlm(model)
    if where.part == "llm":
        return vlm.decoder.width if vlm else None
    if vlm is None:
        tower = open_tower(model)
        if where.part == "out" and tower.head is not None:
            return tower.head_width
        return token_width(tower) if tower.blocks else None
    return token_width(vlm.tower) if vlm.tower else None
