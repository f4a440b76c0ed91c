"""Trained parts of methods: found by the plan, read from files, checked against the model.

A part is one safetensors file. Its header describes it: the method, the settings that build the module (the width of the
tokens among them), what it was trained for (plans, model, data), a signature of the model it was trained on, and a checksum of
all that. Plain state dicts of a training's checkpoints are read too (checkpoints.py). No code of a file is ever run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from tokensieve.errors import UserError, describe_value, short
from tokensieve.models.loading.fingerprints import fingerprint
from tokensieve.parts import checkpoints, folders
from tokensieve.parts.files import check_trainable, read_part
from tokensieve.parts.fit import check_origin, check_width, on_device_of, parts_of_model, shipped_part
from tokensieve.parts.protocol import LoadedPart, Weights
from tokensieve.parts.signature import model_signature
from tokensieve.plan import Plan


def load_parts(plan: Plan, model: nn.Module, weights: Weights = None) -> dict[str, nn.Module]:
    """The trained module of every method of the plan that has one, by the method's name.

    weights: a file; a folder of files, of a training run or of one of its checkpoints; an id on the Hub; several of them;
    Reducers; or modules by name, which are used as they are, whatever model they were made for. The plan need not use all of
    them, but at least one. Without weights, the parts that the model itself holds are used (`Tower.own_parts`), else those that
    ship for the model.
    """
    methods = {step.method.name: step.method for step in plan.steps if step.method.part is not None}
    loaded = read_weights(weights)
    for name, part in loaded.items():
        check_trainable(name, part.source)
    if loaded and not any(name in methods for name in loaded):
        sources = ", ".join(dict.fromkeys(part.source for part in loaded.values()))
        raise UserError(f"{sources}: weights for {' and '.join(loaded)}, but the plan {plan} does not use it")
    if not methods:
        return {}
    own = parts_of_model(model)
    loaded = {name: LoadedPart(own[name], "the model") for name in methods if name in own} | loaded
    signature = model_signature(model) if any(name not in loaded or loaded[name].about for name in methods) else {}
    modules = {}
    for name, method in methods.items():
        if name not in loaded:
            modules[name] = shipped_part(method, plan, model, signature)
            continue
        part = loaded[name]
        if not isinstance(part.part, method.part):
            kind = type(part.part).__name__
            raise UserError(f"{part.source}: the weights for {name} are a {kind}, not a {method.part.__name__}")
        check_width(name, part, plan, model)
        if part.about is not None:
            check_origin(name, part, model, signature)
        modules[name] = part.part if part.about is None else on_device_of(model, part.part)
    return modules


def read_weights(weights: Weights) -> dict[str, LoadedPart]:
    """Everything that the weights hold, by the method's name; of files, the methods' modules in evaluation mode."""
    if isinstance(weights, Mapping):
        headers: Mapping[str, Any] = getattr(weights, "headers", {})  # Reducers have them
        return {name: LoadedPart(part, "weights", headers.get(name)) for name, part in weights.items()}
    sources = [weights] if isinstance(weights, (str, Path)) else weights if weights is not None else []
    if not isinstance(sources, Sequence) or not all(isinstance(source, (str, Path)) for source in sources):
        raise UserError(
            f"weights: {describe_value(weights)}; give a file, a folder, an id on the Hub, a list of them, Reducers, or "
            "modules by the name of their method"
        )
    loaded: dict[str, LoadedPart] = {}
    for source in sources:
        for name, part in _read_source(source).items():
            if name in loaded:
                raise UserError(f"{part.source}: another of the files is for {name} already; give one for each method")
            loaded[name] = part
    return loaded


def parts_fingerprint(parts: Mapping[str, nn.Module]) -> str | None:
    """One name for the weights of all parts; None where there are none."""
    return " ".join(f"{name}:{fingerprint(part)}" for name, part in sorted(parts.items())) or None


def _read_source(source: str | Path) -> dict[str, LoadedPart]:
    """What one file, one folder or one id on the Hub holds."""
    path = folders.find(source)
    if not os.path.isdir(path):
        part = checkpoints.read_state_dict(path) if path.suffix == ".pt" else read_part(path)
        assert part.about is not None
        return {part.about["method"]: part}
    if folders.is_saved(path):
        parts = folders.read_folder(path)[1]
        return {name: LoadedPart(part.part, short(source, 200), part.about) for name, part in parts.items()}
    return read_weights(checkpoints.part_files(checkpoints.folder_of_run(path)))
