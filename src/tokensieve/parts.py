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
from tokensieve.models import Tower, open_tower, open_vlm
from tokensieve.models.reid import ReidModel
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
    "sdtps": "configs/RGBNT201/DeMo_SDTPS.yml",
}


@dataclass(frozen=True)
class Given:
    """A trained module, where it came from, and what its header says; a module that a user made has none."""

    part: nn.Module
    source: str
    about: Mapping[str, Any] | None = None


def load_parts(plan: Plan, model: nn.Module, weights: Weights = None) -> dict[str, nn.Module]:
    """The trained module of every method of the plan that has one, by the method's name.

    weights: a file, a folder of files, an id on the Hub, several of them; Reducers; or modules by name, which are used as they
    are, whatever model they were made for. What the plan does not use is left aside, but something of it must be used. Without
    weights, a model's own parts serve it (`parts` of a re-identification model), else those that ship for the model.
    """
    methods = {step.method.name: step.method for step in plan.steps if step.method.part is not None}
    given = read(weights)
    for name, one in given.items():
        _check_trainable(name, one.source)
    if given and not any(name in methods for name in given):
        sources = ", ".join(dict.fromkeys(one.source for one in given.values()))
        raise UserError(f"{sources}: weights for {' and '.join(given)}, but the plan {plan} does not use it")
    if not methods:
        return {}
    own = _own(model)
    given = {name: Given(own[name], "the model") for name in methods if name in own} | given
    here = origin(model) if any(name not in given or given[name].about for name in methods) else {}
    found = {}
    for name, method in methods.items():
        if name not in given:
            found[name] = _shipped(method, plan, model, here)
            continue
        one = given[name]
        if not isinstance(one.part, method.part):
            kind = type(one.part).__name__
            raise UserError(f"{one.source}: the weights for {name} are a {kind}, not a {method.part.__name__}")
        _check_width(name, one, plan, model)
        if one.about is not None:
            _check_origin(name, one, model, here)
        found[name] = one.part if one.about is None else _on_device_of(model, one.part)
    return found


def read(weights: Weights) -> dict[str, Given]:
    """Everything that the weights hold, by the method's name; of files, the methods' modules in evaluation mode."""
    if isinstance(weights, Mapping):
        headers: Mapping[str, Any] = getattr(weights, "headers", {})  # Reducers have them
        return {name: Given(part, "weights", headers.get(name)) for name, part in weights.items()}
    found: dict[str, Given] = {}
    for source in [weights] if isinstance(weights, (str, Path)) else weights or []:
        for name, one in _read_one(source).items():
            if name in found:
                raise UserError(f"{source}: another of the files is for {name} already; give one for each method")
            found[name] = one
    return found


def read_part(path: Path) -> Given:
    """The part in one file, in evaluation mode."""
    about = read_about(path)
    _check_trainable(about["method"], str(path))
    return Given(_build(path, about, get_method(about["method"])), str(path), about)


def fingerprint(parts: Mapping[str, nn.Module]) -> str | None:
    """One name for the weights of all parts; None where there are none."""
    from tokensieve.models.load import fingerprint as of_module

    return " ".join(f"{name}:{of_module(part)}" for name, part in sorted(parts.items())) or None


# ---------------------------------------------------------------------------------------------------------------- files


def save_part(path: Path, method: str, part: nn.Module, model: nn.Module, trained: Mapping[str, Any]) -> None:
    """Write a part, whole or not at all. trained: what it was trained for, anything JSON can say."""
    from tokensieve.results import write_bytes

    write_bytes(path, pack(part, describe(method, part, origin(model), trained)))


def describe(method: str, part: nn.Module, origin: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a part, but for its checksum. origin: the signature of the model it was trained on."""
    settings: Any = part.settings
    made = {"format": FORMAT, "tokensieve": tokensieve.__version__, "method": method, "settings": dict(settings)}
    return made | {**origin, "trained": dict(trained)}


def pack(part: nn.Module, header: Mapping[str, Any]) -> bytes:
    """The file of a part."""
    from safetensors.torch import save

    header = {**header, "sha256": checksum(part)}
    return save(_tensors(part), metadata={HEADER: json.dumps(header, allow_nan=False)})


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


def checksum(part: nn.Module | Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values of a part's tensors."""
    state = hashlib.sha256()
    for name, value in sorted((_tensors(part) if isinstance(part, nn.Module) else part).items()):
        state.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        state.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


# ------------------------------------------------------------------------------------------------------------ the model


def origin(model: nn.Module) -> dict[str, list[float | None]]:
    """What tells models apart, whatever the number format they are held in: signatures of the tower and of the decoder."""
    vlm = open_vlm(model)
    bodies = list(model.backbones.values()) if isinstance(model, ReidModel) else [model]
    towers = [vlm.tower] if vlm else [open_tower(body) for body in bodies]
    signed = {"tower": signature([block.module for tower in towers if tower for block in tower.blocks])}
    return signed | {"decoder": signature(vlm.decoder.layers)} if vlm else signed


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


def name_of(model: nn.Module) -> str:
    """What a model is called: the folder or the id it was loaded from, else its class."""
    return getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__


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


def width_at(where: Where, model: nn.Module) -> int | None:
    """D of the tokens that a step at this place sees; None if the model has no such place, which placing the plan tells."""
    vlm = open_vlm(model)
    if where.part == "llm":
        return vlm.decoder.width if vlm else None
    if vlm is None:
        tower = open_tower(model)
        if where.part == "out" and tower.head is not None:
            return tower.head_width
        return width(tower) if tower.blocks else None
    return width(vlm.tower) if vlm.tower else None


# -------------------------------------------------------------------------------------------------------------- details


def _own(model: nn.Module) -> Mapping[str, nn.Module]:
    return dict(model.parts.items()) if isinstance(model, ReidModel) else {}


def _check_trainable(name: str, source: str) -> None:
    if name not in REGISTRY:
        raise UserError(f"{source}: weights for {name}, which is no method.{did_you_mean(name, REGISTRY)}")
    if get_method(name).part is None:
        raise UserError(f"{source}: weights for {name}, which is not a trained method")


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


def _read_one(source: str | Path) -> dict[str, Given]:
    """What one file, one folder or one id on the Hub holds."""
    from tokensieve import sharing

    path = sharing.find(source)
    if not path.is_dir():
        one = read_part(path)
        assert one.about is not None
        return {one.about["method"]: one}
    if sharing.is_saved(path):
        reducers = sharing.Reducers.from_pretrained(path)
        return {name: Given(part, str(source), reducers.headers[name]) for name, part in reducers.items()}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(f"no .safetensors file in the folder {str(path)!r}; {_makers()} makes one")
    return read(files)


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
