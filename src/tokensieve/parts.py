"""Trained parts of methods: found by the plan, read from files, checked against the tower.

A part is one safetensors file. Its header says what it is: the method, the width of the tokens, what it was trained for
(plans, model, data), a signature of the tower it was trained on, and a checksum of the tensors. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tokensieve
from tokensieve.errors import UserError, did_you_mean
from tokensieve.methods import REGISTRY, Method, get_method
from tokensieve.models import Tower, open_tower
from tokensieve.plan import Plan

Weights = str | Path | Sequence[str | Path] | Mapping[str, nn.Module] | None
FORMAT = "tokensieve part 1"
HEADER = "tokensieve"  # one entry: safetensors writes several in any order
KEYS = {"method": str, "width": int, "tower": list, "sha256": str, "trained": dict}  # what the header must say
SHIPPED = Path(__file__).parent / "embedded" / "parts"
RECIPES = {"learned": "configs/learned_selector.yaml"}  # what trains each method's part


def load_parts(plan: Plan, model: nn.Module, weights: Weights = None) -> dict[str, nn.Module]:
    """The trained module of every method of the plan that has one, by the method's name.

    weights: a file, a folder of files, several of them, or modules by name (which are used as they are). Without any,
    the parts that ship serve the model they were trained on.
    """
    methods = {step.method.name: step.method for step in plan.steps if step.method.part is not None}
    if isinstance(weights, Mapping):
        for name, part in weights.items():
            _check_wanted(name, methods, f"weights for {name}", plan)
            if not isinstance(part, methods[name].part):
                raise UserError(f"weights for {name} are a {type(part).__name__}, not a {methods[name].part.__name__}")
        found = dict(weights)
    else:
        found = {}
        for path in _files(weights):
            name, part = read_part(path, model, methods, plan)
            if name in found:
                raise UserError(f"{path}: another of the files is for {name} already; give one for each method")
            found[name] = part
    missing = [method for name, method in methods.items() if name not in found]
    return found | {method.name: _shipped(method, model) for method in missing}


def fingerprint(parts: Mapping[str, nn.Module]) -> str | None:
    """One name for the weights of all parts; None where there are none."""
    from tokensieve.models.load import fingerprint as of_module

    return " ".join(f"{name}:{of_module(part)}" for name, part in sorted(parts.items())) or None


def save_part(path: Path, method: str, part: nn.Module, model: nn.Module, trained: Mapping[str, Any]) -> None:
    """Write a part, whole or not at all. trained: what it was trained for, anything JSON can say."""
    from safetensors.torch import save

    from tokensieve.results import write_bytes

    tower = open_tower(model)
    tensors = {name: value.detach().cpu().contiguous() for name, value in part.state_dict().items()}
    about = {
        "format": FORMAT,
        "tokensieve": tokensieve.__version__,
        "method": method,
        "width": width(tower),
        "tower": signature(tower),
        "sha256": checksum(tensors),
        "trained": dict(trained),
    }
    write_bytes(path, save(tensors, metadata={HEADER: json.dumps(about, allow_nan=False)}))


def read_about(path: Path) -> dict[str, Any]:
    """What the header of a part says; a UserError where the file is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER)
        about: dict[str, Any] = json.loads(header) if header else {}
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise UserError(f"{path}: not the trained part of a method; {_makers()} makes such files")
        lacking = [key for key, kind in KEYS.items() if not isinstance(about.get(key), kind)]
        if lacking:
            raise UserError(f"{path}: its header does not say {', '.join(lacking)}; {_makers()} makes files that do")
        return about
    except FileNotFoundError:
        raise UserError(f"no file {str(path)!r}; {_makers()} makes such files") from None
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        told = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: damaged, or not a safetensors file ({told}); {_makers()} makes such files") from None


def read_part(path: Path, model: nn.Module, methods: Mapping[str, Method], plan: Plan) -> tuple[str, nn.Module]:
    """The method's name and its part from one file, checked against the plan and the model's tower."""
    about = read_about(path)
    name = about["method"]
    _check_wanted(name, methods, f"{path}: these weights are for {name}", plan)
    arrives = width(open_tower(model))
    if about["width"] != arrives:
        told = about["trained"].get("model", "another model")
        raise UserError(f"{path}: trained for tokens of width {about['width']} ({told}), this model's have {arrives}")
    return name, _build(path, about, methods[name], model)


def signature(tower: Tower) -> list[float]:
    """The norm of each block's weights: tells towers apart, whatever the number format they are held in."""
    norms = []
    for block in tower.blocks:
        squares = sum(float(p.detach().double().square().sum()) for p in block.module.parameters())
        norms.append(round(squares**0.5, 4))
    return norms


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values."""
    state = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        state.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        state.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def width(tower: Tower) -> int:
    """D of the tokens (B, N, D): what the last linear map of a block gives."""
    *_, last = (module for module in tower.blocks[0].module.modules() if isinstance(module, nn.Linear))
    return last.out_features


# -------------------------------------------------------------------------------------------------------------- details


def _build(path: Path, about: Mapping[str, Any], method: Method, model: nn.Module) -> nn.Module:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    part: nn.Module = method.part(about["width"])
    try:
        state = load_file(str(path))
        if checksum(state) != about["sha256"]:
            raise UserError(f"{path}: damaged, its tensors are not those that were saved; copy it again, or train it again")
        part.load_state_dict(state)
    except (SafetensorError, OSError, RuntimeError) as error:
        told = " ".join(str(error).split())[:160]
        raise UserError(f"{path}: damaged, or from another version of {method.name} ({told})") from None
    if not all(bool(torch.isfinite(value).all()) for value in state.values()):
        raise UserError(f"{path}: holds NaN or infinity; train it again with a lower learning rate")
    return part.requires_grad_(False).eval().to(next(model.parameters()).device)


def _files(weights: str | Path | Sequence[str | Path] | None) -> list[Path]:
    """Every file that is meant: of a folder those in it."""
    if weights is None:
        return []
    files: list[Path] = []
    for path in map(Path, [weights] if isinstance(weights, (str, Path)) else weights):
        inside = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"no .safetensors file in the folder {str(path)!r}; {_makers()} makes one")
        files += inside
    return files


def _shipped(method: Method, model: nn.Module) -> nn.Module:
    """The part that ships for this very tower; a UserError where there is none."""
    tower = open_tower(model)
    path = SHIPPED / f"{method.name}.safetensors"
    if path.is_file():
        about = read_about(path)
        here = torch.tensor(signature(tower))
        there = torch.tensor(about["tower"])
        if about["width"] == width(tower) and here.shape == there.shape and torch.allclose(here, there, rtol=2e-3):
            return _build(path, about, method, model)
    recipe = RECIPES.get(method.name, "CONFIG")
    raise UserError(f"{method.name} needs trained weights: --weights FILE, made by tokensieve train {recipe}")


def _check_wanted(name: str, methods: Mapping[str, Method], told: str, plan: Plan) -> None:
    if name in methods:
        return
    if name not in REGISTRY:
        raise UserError(f"{told}, which is no method.{did_you_mean(name, REGISTRY)}")
    if get_method(name).part is None:
        raise UserError(f"{told}, which is not a trained method")
    raise UserError(f"{told}, but the plan {plan} does not use it")


def _makers() -> str:
    return " or ".join(f"tokensieve train {recipe}" for recipe in RECIPES.values())
