"""Trained parts of methods: found by the plan, read from files, checked against the model.

A part is one safetensors file. Its header says what it is: the method, the settings that build the module (the width of the
tokens among them), what it was trained for (plans, model, data), a signature of the model it was trained on, and a checksum of
the tensors. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tokensieve.errors import UserError
from tokensieve.parts.files import check_trainable, read_part, training_commands
from tokensieve.parts.fit import check_origin, check_width, on_device_of, parts_of_model, shipped_part
from tokensieve.parts.protocol import LoadedPart, Weights
from tokensieve.parts.signature import model_signature
from tokensieve.plan import Plan


def load_parts(plan: Plan, model: nn.Module, weights: Weights = None) -> dict[str, nn.Module]:
    """The trained module of every method of the plan that has one, by the method's name.

    weights: a file, a folder of files, an id on the Hub, several of them; Reducers; or modules by name, which are used as they
    are, whatever model they were made for. What the plan does not use is left aside, but something of it must be used. Without
    weights, a model's own parts serve it (`parts` of a re-identification model), else those that ship for the model.
    """
    methods = {step.method.name: step.method for step in plan.steps if step.method.part is not None}
    given = read_weights(weights)
    for name, one in given.items():
        check_trainable(name, one.source)
    if given and not any(name in methods for name in given):
        sources = ", ".join(dict.fromkeys(one.source for one in given.values()))
        raise UserError(f"{sources}: weights for {' and '.join(given)}, but the plan {plan} does not use it")
    if not methods:
        return {}
    own = parts_of_model(model)
    given = {name: LoadedPart(own[name], "the model") for name in methods if name in own} | given
    here = model_signature(model) if any(name not in given or given[name].about for name in methods) else {}
    found = {}
    for name, method in methods.items():
        if name not in given:
            found[name] = shipped_part(method, plan, model, here)
            continue
        one = given[name]
        if not isinstance(one.part, method.part):
            kind = type(one.part).__name__
            raise UserError(f"{one.source}: the weights for {name} are a {kind}, not a {method.part.__name__}")
        check_width(name, one, plan, model)
        if one.about is not None:
            check_origin(name, one, model, here)
        found[name] = one.part if one.about is None else on_device_of(model, one.part)
    return found


def read_weights(weights: Weights) -> dict[str, LoadedPart]:
    """Everything that the weights hold, by the method's name; of files, the methods' modules in evaluation mode."""
    if isinstance(weights, Mapping):
        headers: Mapping[str, Any] = getattr(weights, "headers", {})  # Reducers have them
        return {name: LoadedPart(part, "weights", headers.get(name)) for name, part in weights.items()}
    found: dict[str, LoadedPart] = {}
    for source in [weights] if isinstance(weights, (str, Path)) else weights or []:
        for name, one in _read_one(source).items():
            if name in found:
                raise UserError(f"{source}: another of the files is for {name} already; give one for each method")
            found[name] = one
    return found


def parts_fingerprint(parts: Mapping[str, nn.Module]) -> str | None:
    """One name for the weights of all parts; None where there are none."""
    from tokensieve.models.loading.fingerprints import fingerprint as of_module

    return " ".join(f"{name}:{of_module(part)}" for name, part in sorted(parts.items())) or None


def _read_one(source: str | Path) -> dict[str, LoadedPart]:
    """What one file, one folder or one id on the Hub holds."""
    from tokensieve.parts import hub as parts_hub

    path = parts_hub.find(source)
    if not path.is_dir():
        one = read_part(path)
        assert one.about is not None
        return {one.about["method"]: one}
    if parts_hub.is_saved(path):
        reducers = parts_hub.Reducers.from_pretrained(path)
        return {name: LoadedPart(part, str(source), reducers.headers[name]) for name, part in reducers.items()}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(f"no .safetensors file in the folder {str(path)!r}; {training_commands()} makes one")
    return read_weights(files)
