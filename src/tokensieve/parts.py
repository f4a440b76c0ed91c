"""Trained parts of methods: found by the plan, read from files, checked against the model.

A part is one safetensors file. Its header says what it is: the method, the settings that build the module (the width of the
tokens among them), what it was trained for (plans, model, data), a signature of the model it was trained on, and a checksum of
the tensors. Nothing is ever unpickled.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tokensieve
from tokensieve.errors import UserError, did_you_mean
from tokensieve.methods import REGISTRY, Method, get_method
from tokensieve.models import Tower, open_tower
from tokensieve.plan import Plan, Where

Weights = str | Path | Sequence[str | Path] | Mapping[str, nn.Module] | None
FORMAT = "tokensieve part 1"
HEADER = "tokensieve"  # one entry: safetensors writes several in any order
KEYS = {"method": str, "settings": dict, "tower": list, "sha256": str, "trained": dict}  # what the header must say
SIGNED = ("tower", "decoder")  # what of a model is signed
SHIPPED = Path(__file__).parent / "embedded" / "parts"
RECIPES = {  # what trains each method's part
    "learned": "configs/learned_selector.yaml",
    "merger": "configs/vision_token_pruning.yaml",
    "cross": "configs/vision_token_pruning.yaml",
}


@dataclass(frozen=True)
class Given:
    """A trained module, where it came from, and what its header says; a module that a user made has none."""

    part: nn.Module
    told: str
    about: Mapping[str, Any] | None = None


def load_parts(plan: Plan, model: nn.Module, weights: Weights = None) -> dict[str, nn.Module]:
    """The trained module of every method of the plan that has one, by the method's name.

    weights: a file, a folder of files, an id on the Hub, several of them; Reducers; or modules by name, which are used as they
    are, whatever model they were made for. What the plan does not use is left aside, but something of it must be used. Without
    weights, the parts that ship serve the model they were trained on.
    """
    methods = {step.method.name: step.method for step in plan.steps if step.method.part is not None}
    given = read(weights)
    for name, one in given.items():
        _check_trainable(name, one.told)
    if given and not any(name in methods for name in given):
        raise UserError(f"{' and '.join(one.told for one in given.values())}, but the plan {plan} does not use it")
    if not methods:
        return {}
    here = origin(model) if any(name not in given or given[name].about for name in methods) else {}
    found = {}
    for name, method in methods.items():
        if name not in given:
            found[name] = _shipped(method, plan, model, here)
            continue
        one = given[name]
        if not isinstance(one.part, method.part):
            raise UserError(f"{one.told} are a {type(one.part).__name__}, not a {method.part.__name__}")
        _check_width(name, one, plan, model)
        if one.about is not None:
            _check_origin(name, one, model, here)
        found[name] = one.part if one.about is None else _on_device_of(model, one.part)
    return found


def read(weights: Weights) -> dict[str, Given]:
    """Everything that the weights hold, by the method's name; of files, the methods' modules in evaluation mode."""
    if isinstance(weights, Mapping):
        headers: Mapping[str, Any] = getattr(weights, "headers", {})  # Reducers have them
        return {name: Given(part, f"weights for {name}", headers.get(name)) for name, part in weights.items()}
    found: dict[str, Given] = {}
    for path in _files(weights):
        about = read_about(path)
        name = about["method"]
        told = f"{path}: these weights are for {name}"
        _check_trainable(name, told)
        if name in found:
            raise UserError(f"{path}: another of the files is for {name} already; give one for each method")
        found[name] = Given(_build(path, about, get_method(name)), told, about)
    return found


def fingerprint(parts: Mapping[str, nn.Module]) -> str | None:
    """One name for the weights of all parts; None where there are none."""
    from tokensieve.models.load import fingerprint as of_module

    return " ".join(f"{name}:{of_module(part)}" for name, part in sorted(parts.items())) or None


# ---------------------------------------------------------------------------------------------------------------- files


def save_part(path: Path, method: str, part: nn.Module, model: nn.Module, trained: Mapping[str, Any]) -> None:
    """Write a part, whole or not at all. trained: what it was trained for, anything JSON can say."""
    write_part(path, part, describe(method, part, origin(model), trained))


def describe(method: str, part: nn.Module, origin: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a part. origin: the signature of the model it was trained on."""
    return {
        "format": FORMAT,
        "tokensieve": tokensieve.__version__,
        "method": method,
        "settings": dict(part.settings),  # type: ignore[arg-type]
        **origin,
        "sha256": checksum(_tensors(part)),
        "trained": dict(trained),
    }


def write_part(path: Path, part: nn.Module, about: Mapping[str, Any]) -> None:
    """Write a part under the header describe() made, whole or not at all."""
    from safetensors.torch import save

    from tokensieve.results import write_bytes

    about = {**about, "sha256": checksum(_tensors(part))}
    write_bytes(path, save(_tensors(part), metadata={HEADER: json.dumps(about, allow_nan=False)}))


def read_about(path: Path) -> dict[str, Any]:
    """What the header of a part says; a UserError where the file is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER)
        about: dict[str, Any] = json.loads(header) if header else {}
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise UserError(f"{path}: not the trained part of a method; {_makers()} makes such files")
        if "width" in about:  # headers of 0.1 have no other setting
            about.setdefault("settings", {"width": about["width"]})
        lacking = [key for key, kind in KEYS.items() if not isinstance(about.get(key), kind)]
        if not lacking and not isinstance(about["settings"].get("width"), int):
            lacking = ["settings.width"]
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


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values."""
    state = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        state.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        state.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


# ------------------------------------------------------------------------------------------------------------ the model


def origin(model: nn.Module) -> dict[str, list[float | None]]:
    """What tells models apart, whatever the number format they are held in: the signature of the tower's blocks."""
    return {"tower": signature([block.module for block in open_tower(model).blocks])}


def signature(layers: Sequence[nn.Module]) -> list[float | None]:
    """The norm of each layer's weights; None where they are quantised or not in memory, which tells nothing."""
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


def same(here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """Whether a model with the signature `here` is the one that was signed there (its decoder only if it was)."""
    for of in SIGNED:
        if of not in there:
            continue
        mine, theirs = here.get(of), there[of]
        if mine is None or len(mine) != len(theirs):
            return False
        known = [(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None]
        if any(abs(a - b) > 2e-3 * abs(b) for a, b in known):
            return False
    return True


def width(tower: Tower) -> int:
    """D of the tokens (B, N, D): what the last linear map of a block gives."""
    *_, last = (module for module in tower.blocks[0].module.modules() if isinstance(module, nn.Linear))
    return last.out_features


def width_at(where: Where, model: nn.Module) -> int:
    """D of the tokens that a step at this place sees."""
    return width(open_tower(model))


# -------------------------------------------------------------------------------------------------------------- details


def _check_trainable(name: str, told: str) -> None:
    if name not in REGISTRY:
        raise UserError(f"{told}, which is no method.{did_you_mean(name, REGISTRY)}")
    if get_method(name).part is None:
        raise UserError(f"{told}, which is not a trained method")


def _check_width(name: str, given: Given, plan: Plan, model: nn.Module) -> None:
    """A UserError unless the part is for tokens as wide as they are wherever the plan uses it."""
    made: Any = given.part.settings
    for step in plan.steps:
        if step.method.name == name and (arrives := width_at(step.where, model)) != made["width"]:
            source = given.told.split(": these weights")[0]
            told = _trained_on(given.about)
            raise UserError(f"{source}: trained for tokens of width {made['width']} ({told}), {step} sees width {arrives}")


def _check_origin(name: str, given: Given, model: nn.Module, here: Mapping[str, Any]) -> None:
    assert given.about is not None
    if same(here, given.about):
        return
    source = given.told.split(": these weights")[0]
    raise UserError(
        f"{source}: trained on {_trained_on(given.about)}, and this model ({_name(model)}) is another or has other weights; "
        f"train it for this one: tokensieve train {RECIPES.get(name, 'CONFIG')}"
    )


def _trained_on(about: Mapping[str, Any] | None) -> str:
    return str(((about or {}).get("trained") or {}).get("model", "another model"))


def _name(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    return getattr(config, "name_or_path", "") or type(model).__name__


def _tensors(part: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in part.state_dict().items()}


def _on_device_of(model: nn.Module, part: nn.Module) -> nn.Module:
    """The part beside the model; a copy if it lies elsewhere, since others may use it there."""
    device = next(model.parameters()).device
    if any(parameter.device != device for parameter in part.parameters()):
        part = copy.deepcopy(part).to(device)
    return part


def _build(path: Path, about: Mapping[str, Any], method: Method) -> nn.Module:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        part: nn.Module = method.part(**about["settings"])
        state = load_file(str(path))
        if checksum(state) != about["sha256"]:
            raise UserError(f"{path}: damaged, its tensors are not those that were saved; copy it again, or train it again")
        part.load_state_dict(state)
    except UserError:
        raise
    except (SafetensorError, OSError, RuntimeError, TypeError, ValueError) as error:
        told = " ".join(str(error).split())[:160]
        raise UserError(f"{path}: damaged, or from another version of {method.name} ({told})") from None
    if not all(bool(torch.isfinite(value).all()) for value in state.values()):
        raise UserError(f"{path}: holds NaN or infinity; train it again with a lower learning rate")
    return part.requires_grad_(False).eval()


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


def _shipped(method: Method, plan: Plan, model: nn.Module, here: Mapping[str, Any]) -> nn.Module:
    """The part that ships for this very model; a UserError where there is none."""
    path = SHIPPED / f"{method.name}.safetensors"
    if path.is_file() and same(here, about := read_about(path)):
        part = _build(path, about, method)
        _check_width(method.name, Given(part, str(path), about), plan, model)
        return _on_device_of(model, part)
    recipe = RECIPES.get(method.name, "CONFIG")
    raise UserError(f"{method.name} needs trained weights: --weights FILE, made by tokensieve train {recipe}")


def _makers() -> str:
    return " or ".join(f"tokensieve train {recipe}" for recipe in dict.fromkeys(RECIPES.values()))
