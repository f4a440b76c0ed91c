"""Whether a trained part fits a model and a plan, and the parts that ship or that a model itself holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tokensieve.errors import UserError, short
from tokensieve.methods.registry import Method
from tokensieve.models.registry import open_tower, open_vlm
from tokensieve.parts.files import build_part, read_part_file, training_command
from tokensieve.parts.protocol import LoadedPart
from tokensieve.parts.signature import model_name, signatures_match, width_at
from tokensieve.plan import Plan

SHIPPED = Path(__file__).parents[1] / "embedded" / "parts"


def parts_of_model(model: nn.Module) -> Mapping[str, nn.Module]:
    """The trained parts that a model itself holds, by the method's name."""
    return {} if open_vlm(model) else open_tower(model).own_parts


def check_width(name: str, loaded: LoadedPart, plan: Plan, model: nn.Module) -> None:
    """A UserError unless the part is for tokens of the width that they have wherever the plan uses it."""
    settings: Any = loaded.part.settings
    for step in plan.steps:
        width = width_at(step.resolved_where(), model) if step.method.name == name else None
        if width not in (None, settings["width"]):
            trained = f"tokens of width {settings['width']} ({_trained_on(loaded.about)})"
            raise UserError(f"{loaded.source}: {name} was trained for {trained}, and {step} sees tokens of width {width}")


def check_origin(name: str, loaded: LoadedPart, model: nn.Module, signature: Mapping[str, Any]) -> None:
    """A UserError unless the part was trained on this model. signature: the model's."""
    assert loaded.about is not None
    if signatures_match(signature, loaded.about):
        return
    raise UserError(
        f"{loaded.source}: {name} was trained on {_trained_on(loaded.about)}, and this model ({model_name(model)}) is another "
        f"or has other weights; train it for this one: {training_command(name)}"
    )


def _trained_on(about: Mapping[str, Any] | None) -> str:
    return short(((about or {}).get("trained") or {}).get("model", "another model"), 100)


def on_device_of(model: nn.Module, part: nn.Module) -> nn.Module:
    """The part beside the model; a copy if it is on another device, since others may use it there."""
    device = next(model.parameters()).device
    if any(parameter.device != device for parameter in part.parameters()):
        part = copy.deepcopy(part).to(device)
    return part


def shipped_part(method: Method, plan: Plan, model: nn.Module, signature: Mapping[str, Any]) -> nn.Module:
    """The part that ships for this very model; a UserError where there is none."""
    path = SHIPPED / f"{method.name}.safetensors"
    if path.is_file():
        about, tensors = read_part_file(path)
        if signatures_match(signature, about):
            part = build_part(str(path), about, method, tensors)
            check_width(method.name, LoadedPart(part, str(path), about), plan, model)
            return on_device_of(model, part)
    raise UserError(f"{method.name} needs trained weights: --weights FILE, made by {training_command(method.name)}")
