"""The search space of two-stage VLM pruning where a file names none: ratios, layers, learning rates, weights of the losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tokensieve.config.model_shape import model_shape
from tokensieve.config.pruning_steps import Optimizers
from tokensieve.config.section import Rate

LAYERS = ((10, 20, 31), (5, 15, 25), (20, 25, 31), (8, 12, 16, 20, 24, 28, 31))  # of the original, for a decoder of 32 layers
RATE_KEY = "trainer_settings.dl_settings.optimizers"


def default_space(data: Mapping[str, Any]) -> dict[str, Any]:
    """Ranges around the values of a file. Counts of tokens that it gives follow the ratios instead."""
    method, backbone = _section(data, "method_settings"), _section(data, "backbone_settings")
    name, cache = backbone.get("name"), backbone.get("cache_dir")
    shape = model_shape(name, cache if isinstance(cache, str) else None) if isinstance(name, str) else None
    depth = 32 if shape is None else shape[1]
    choices = dict.fromkeys(tuple(sorted({min(depth - 1, round(n * depth / 32)) for n in layers})) for layers in LAYERS)
    space: dict[str, Any] = {}
    if method.get("merger_type") != "none":
        space["merge_ratio"] = {"low": 0.3, "high": 0.6, "step": 0.05}
    if method.get("pruning_layers") != []:
        space["pruning_layers"] = {"choices": [list(layers) for layers in choices]}
    for key, searched in (("target_merge_tokens", "merge_ratio"), ("target_prune_tokens", "pruning_layers")):
        if method.get(key) is not None and searched in space:
            space[key] = {"choices": [None]}
    space |= {
        "task_loss_weight": {"low": 5, "high": 50, "log": True},
        "adv_loss_weight": {"low": 0.1, "high": 2, "log": True},
        "merge_sparsity_weight": {"low": 1e-5, "high": 1e-3, "log": True},
    }
    if method.get("adv_loss_weight") == 0:
        del space["adv_loss_weight"]
    rates = _section(_section(_section(data, "trainer_settings"), "dl_settings"), "optimizers")
    ranges = {f"{RATE_KEY}.{name}.lr": _around(_section(rates, name).get("lr"), own.lr) for name, own in Optimizers()}
    return {f"method_settings.{key}": values for key, values in space.items()} | ranges


def _section(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = data.get(key)
    return section if isinstance(section, Mapping) else {}


def _around(value: Any, default: float) -> dict[str, Any]:
    """A tenth to ten times a learning rate, which a file may give as a text; the default if it is none."""
    try:
        rate: float = TypeAdapter(Rate).validate_python(value)
    except ValidationError:
        rate = default
    rate = rate if rate > 1e-12 else default  # a tenth of a still smaller one may be 0
    return {"low": float(f"{rate / 10:.6g}"), "high": float(f"{rate * 10:.6g}"), "log": True}
