"""TODO docstring."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tokensieve.errors import UserError
from tokensieve.methods.registry import Method
from tokensieve.parts.files import RECIPES, build_part, read_header
from tokensieve.parts.protocol import LoadedPart
from tokensieve.parts.signature import model_name, signatures_match, width_at
from tokensieve.plan import Plan
from tokensieve.reid.model import ReidModel

SHIPPED = Path(__file__).parents[1] / "embedded" / "parts"


def parts_of_model(model: nn.Module) -> Mapping[str, nn.Module]:
    return dict(model.parts.items()) if isinstance(model, ReidModel) else {}


def check_width(name: str, given: LoadedPart, plan: Plan, model: nn.Module) -> None:
    """A UserError unless the part is for tokens as wide as they are wherever the plan uses it."""
    made: Any = given.part.settings
    for step in plan.steps:
        arrives = width_at(step.where, model) if step.method.name == name else None
        if arrives not in (None, made["width"]):
            told = f"tokens of width {made['width']} ({_trained_on(given.about)})"
            raise UserError(f"{given.source}: {name} was trained for {told}, and {step} sees tokens of width {arrives}")


def check_origin(name: str, given: LoadedPart, model: nn.Module, here: Mapping[str, Any]) -> None:
    assert given.about is not None
    if signatures_match(here, given.about):
        return
    raise UserError(
        f"{given.source}: {name} was trained on {_trained_on(given.about)}, and this model ({model_name(model)}) is another "
        f"or has other weights; train it for this one: tokensieve train {RECIPES.get(name, 'CONFIG')}"
    )


def _trained_on(about: Mapping[str, Any] | None) -> str:
    return str(((about or {}).get("trained") or {}).get("model", "another model"))


def on_device_of(model: nn.Module, part: nn.Module) -> nn.Module:
    """The part beside the model; a copy if it lies elsewhere, since others may use it there."""
    device = next(model.parameters()).device
    if any(parameter.device != device for parameter in part.parameters()):
        part = copy.deepcopy(part).to(device)
    return part


def shipped_part(method: Method, plan: Plan, model: nn.Module, here: Mapping[str, Any]) -> nn.Module:
    """The part that ships for this very model; a UserError where there is none."""
    path = SHIPPED / f"{method.name}.safetensors"
    if path.is_file() and signatures_match(here, about := read_header(path)):
        part = build_part(path, about, method)
        check_width(method.name, LoadedPart(part, str(path), about), plan, model)
        return on_device_of(model, part)
    recipe = RECIPES.get(method.name, "CONFIG")
    raise UserError(f"{method.name} needs trained weights: --weights FILE, made by tokensieve train {recipe}")
