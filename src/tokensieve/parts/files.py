"""The file of a trained part: one safetensors file with a header that describes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tokensieve
from tokensieve.errors import UserError, did_you_mean, one_line
from tokensieve.files import write_bytes
from tokensieve.methods.registry import REGISTRY, Method, get_method
from tokensieve.parts.protocol import LoadedPart
from tokensieve.parts.signature import model_signature

FORMAT = "tokensieve part 1"
HEADER = "tokensieve"  # one entry: safetensors writes several in any order
KEYS = {"method": str, "settings": dict, "tower": list, "sha256": str, "trained": dict}  # what the header must hold


def read_part(path: Path) -> LoadedPart:
    """The part in one file, in evaluation mode."""
    about = read_header(path)
    check_trainable(about["method"], str(path))
    return LoadedPart(build_part(path, about, get_method(about["method"])), str(path), about)


def save_part(path: Path, method: str, part: nn.Module, model: nn.Module, trained: Mapping[str, Any]) -> None:
    """Write a part, whole or not at all. trained: what it was trained for, any JSON value."""
    write_bytes(path, pack_part(part, describe_part(method, part, model_signature(model), trained)))


def describe_part(method: str, part: nn.Module, origin: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a part, but for its checksum. origin: the signature of the model it was trained on."""
    settings: Any = part.settings
    header = {"format": FORMAT, "tokensieve": tokensieve.__version__, "method": method, "settings": dict(settings)}
    return header | {**origin, "trained": dict(trained)}


def pack_part(part: nn.Module, header: Mapping[str, Any]) -> bytes:
    """The file of a part."""
    from safetensors.torch import save

    header = {**header, "sha256": part_checksum(part)}
    return save(_tensors(part), metadata={HEADER: json.dumps(header, allow_nan=False)})


def read_header(path: Path) -> dict[str, Any]:
    """The header of a part; a UserError if the file is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER)
        about: dict[str, Any] = json.loads(header) if header else {}
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise UserError(f"{path}: not the trained part of a method; {training_commands()} makes such files")
        if "width" in about:  # headers of 0.1 have no other setting
            about.setdefault("settings", {"width": about["width"]})
        lacking = [key for key, kind in KEYS.items() if not isinstance(about.get(key), kind)]
        if not lacking and not isinstance(about["settings"].get("width"), int):
            lacking = ["settings.width"]
        if lacking:
            raise UserError(f"{path}: its header has no {', '.join(lacking)}; {training_commands()} makes complete files")
        return about
    except FileNotFoundError:
        raise UserError(f"no file {str(path)!r}; {training_commands()} makes such files") from None
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = one_line(error, 120)
        raise UserError(
            f"{path}: damaged, or not a safetensors file ({reason}); {training_commands()} makes such files"
        ) from None


def part_checksum(part: nn.Module | Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values of a part's tensors."""
    state = hashlib.sha256()
    for name, value in sorted((_tensors(part) if isinstance(part, nn.Module) else part).items()):
        state.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        state.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def check_trainable(name: str, source: str) -> None:
    if name not in REGISTRY:
        raise UserError(f"{source}: weights for {name}, which is no method.{did_you_mean(name, REGISTRY)}")
    if get_method(name).part is None:
        raise UserError(f"{source}: weights for {name}, which is not a trained method")


def _tensors(part: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in part.state_dict().items()}


def build_part(path: Path, about: Mapping[str, Any], method: Method) -> nn.Module:
    """The module in a file whose header is `about`, in evaluation mode."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(str(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: damaged, or not a safetensors file ({one_line(error, 160)})") from None
    if part_checksum(state) != about["sha256"]:
        raise UserError(f"{path}: damaged, its tensors are not those that were saved; copy it again, or train it again")
    return fill_part(path, about, method, state)


def fill_part(path: Path, about: Mapping[str, Any], method: Method, state: Mapping[str, Tensor]) -> nn.Module:
    """The module that a header describes with these tensors, in evaluation mode. path: where they come from, for messages."""
    try:
        part: nn.Module = method.part(**about["settings"])
        part.load_state_dict(state)
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        reason = one_line(error, 160)
        raise UserError(f"{path}: damaged, or from another version of {method.name} ({reason})") from None
    if not all(bool(torch.isfinite(value).all()) for value in state.values()):
        raise UserError(f"{path}: holds NaN or infinity; train it again with a lower learning rate")
    return part.requires_grad_(False).eval()


def training_command(method: str) -> str:
    """The command that trains the part of a method."""
    return get_method(method).recipe or "tokensieve train CONFIG"


def training_commands() -> str:
    """The commands that train the parts of all methods."""
    return " or ".join(dict.fromkeys(method.recipe for method in REGISTRY.values() if method.recipe))
