"""TODO docstring."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tokensieve.errors import UserError
from tokensieve.methods.registry import Method
from tokensieve.parts.files import RECIPES, _build, read_about
from tokensieve.parts.protocol import Given
from tokensieve.parts.signature import name_of, same, width_at
from tokensieve.plan import Plan
from tokensieve.reid.model import ReidModel

SHIPPED = Path(__file__).parents[1] / "embedded" / "parts"


def _own(model: nn.Module) -> Mapping[str, nn.Module]:
    return dict(model.parts.items()) if isinstance(model, ReidModel) else {}


def _check_width(name: str, given: Given, plan: Plan, model: nn.Module) -> None:
    """A UserError unless the part is for tokens as wide as they are wherever the plan uses it."""
    made: Any = given.part.settings
    for step in plan.steps:
        arrives = width_at(step.where, model) if step.method.name == name else None
        if arrives not in (None, made["width"]):
            told = f"tokens of width {made['width']} ({_trained_on(given.about)})"
            raise UserError(f"{given.source}: {name} was trained for {told}, and {step} sees tokens of width {arrives}")


def _check_origin(name: str, given: Given, model: nn.Module, here: Mapping[str, Any]) -> None:
    assert given.about is not None
    if same(here, given.about):
        return
    raise UserError(
        f"{given.source}: {name} was trained on {_trained_on(given.about)}, and this model ({name_of(model)}) is another "
        f"or has other weights; train it for this one: tokensieve train {RECIPES.get(name, 'CONFIG')}"
    )


def _trained_on(about: Mapping[str, Any] | None) -> str:
    return str(((about or {}).get("trained") or {}).get("model", "another model"))


def _on_device_of(model: nn.Module, part: nn.Module) -> nn.Module:
    """The part beside the model; a copy if it lies elsewhere, since others may use it there."""
    device = next(model.parameters()).device
    if any(parameter.device != device for parameter in part.parameters()):
        part = copy.deepcopy(part).to(device)
    return part


def _shipped(method: Method, plan: Plan, model: nn.Module, here: Mapping[str, Any]) -> nn.Module:
    """The part that ships for this very model; a UserError where there is none."""
    path = SHIPPED / f"{method.name}.safetensors"
    if path.is_file() and same(here, about := read_about(path)):
        part = _build(path, about, method)
        _check_width(method.name, Given(part, str(path), about), plan, model)
        return _on_device_of(model, part)
    recipe = RECIPES.get(method.name, "CONFIG")
    raise UserError(f"{method.name} needs trained weights: --weights FILE, made by tokensieve train {recipe}")
