"""The file of a trained part: one safetensors file with a header that describes it.

The header's checksum covers the header and the tensors. Files of version 0.1 ("tokensieve part 1") have one that covers the
tensors alone; they are still read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tokensieve
from tokensieve.errors import UserError, did_you_mean, short
from tokensieve.files import parse_json, write_bytes
from tokensieve.methods.registry import REGISTRY, Method, get_method
from tokensieve.parts.header import CHECKSUM, MAX_HEADER, as_header, check_header, checksum
from tokensieve.parts.protocol import LoadedPart
from tokensieve.parts.signature import SIGNED, model_signature
from tokensieve.parts.tensor_files import FLOATS, check_tensors, read_safetensors, tensor_blocks

FORMAT, FIRST_FORMAT = "tokensieve part 2", "tokensieve part 1"
HEADER = "tokensieve"  # one entry: safetensors writes several in any order
KEYS = {"method": str, "settings": dict, "tower": list, CHECKSUM: str, "trained": dict}  # what the header must hold


class PartFile(NamedTuple):
    """What a file holds, as it was saved."""

    about: dict[str, Any]  # the header
    tensors: dict[str, Tensor]


def read_part(path: Path) -> LoadedPart:
    """The part in one file, in evaluation mode."""
    source = short(path, 200)
    about, tensors = read_part_file(path)
    check_trainable(about["method"], source)
    return LoadedPart(build_part(source, about, get_method(about["method"]), tensors), source, about)


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

    tensors = {name: value.clone() for name, value in _tensors(part).items()}  # safetensors refuses those that share memory
    return save(tensors, metadata={HEADER: json.dumps(seal_header(part, header))})


def seal_header(part: nn.Module, header: Mapping[str, Any]) -> dict[str, Any]:
    """The header with its checksum; a UserError for what could not be read again."""
    name, tensors = str(header["method"]), _tensors(part)
    for key, value in tensors.items():
        if value.is_floating_point() and value.dtype not in FLOATS:
            raise UserError(f"{name}: {key} is of type {value.dtype}; convert the part with .float() before it is saved")
    sealed = as_header({**header, "format": FORMAT}, name)
    return {**sealed, CHECKSUM: checksum(sealed, tensor_blocks(tensors))}


def read_header(path: Path) -> dict[str, Any]:
    """The header of a part; a UserError if the file is none, or is damaged."""
    return read_part_file(path).about


def read_part_file(path: Path) -> PartFile:
    """Header and tensors of a part; a UserError if the file is none, or is damaged."""
    source = short(path, 200)
    if not os.path.exists(path):
        raise UserError(f"no file {source!r}; {training_commands()} makes such files")
    tensors, metadata = read_safetensors(path)
    text = metadata.get(HEADER, "{}")
    if len(text) > MAX_HEADER:
        raise UserError(f"{source}: its header has {len(text):,} characters, more than {MAX_HEADER:,}")
    about = parse_json(text, f"{source}: its header")
    if not isinstance(about, dict) or about.get("format") not in (FORMAT, FIRST_FORMAT):
        raise UserError(f"{source}: not the trained part of a method; {training_commands()} makes such files")
    check_header(about, source)
    if about["format"] == FIRST_FORMAT and "width" in about:  # the first ones have no other setting
        about.setdefault("settings", {"width": about.pop("width")})
    _check_keys(about, source)
    saved = part_checksum(tensors) if about["format"] == FIRST_FORMAT else checksum(about, tensor_blocks(tensors))
    if about[CHECKSUM] != saved:
        raise UserError(f"{source}: damaged, it is not as it was saved; copy it again, or train it again")
    return PartFile(about, tensors)


def _check_keys(about: Mapping[str, Any], source: str) -> None:
    """A UserError unless the header holds what it must, of the right types."""
    lacking = [key for key, kind in KEYS.items() if not isinstance(about.get(key), kind)]
    if not lacking and type(about["settings"].get("width")) is not int:
        lacking = ["settings.width"]
    for of in SIGNED:
        norms = about.get(of, [])
        if of not in lacking and not (isinstance(norms, list) and all(map(_is_norm, norms))):
            lacking.append(of)
    if lacking:
        raise UserError(f"{source}: its header has no {', '.join(lacking)}; {training_commands()} makes complete files")


def _is_norm(value: Any) -> bool:
    """Whether a value is the norm of a layer, as `layer_norms` gives it."""
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0)


def part_checksum(part: nn.Module | Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values of a part's tensors."""
    state = hashlib.sha256()
    for block in tensor_blocks(_tensors(part) if isinstance(part, nn.Module) else part):
        state.update(block)
    return state.hexdigest()


def check_trainable(name: str, source: str) -> None:
    if name not in REGISTRY:
        raise UserError(f"{source}: weights for {short(name)}, which is no method.{did_you_mean(short(name), REGISTRY)}")
    if get_method(name).part is None:
        raise UserError(f"{source}: weights for {name}, which is not a trained method")


def _tensors(part: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in part.state_dict().items()}


def build_part(source: str, about: Mapping[str, Any], method: Method, tensors: Mapping[str, Any]) -> nn.Module:
    """The module that a header describes with these tensors, in evaluation mode. source: where they come from, for messages.

    It is built without memory first, on the meta device: a header can name any size, a file holds what its tensors need.
    """
    with torch.device("meta"):
        wanted = _new_part(source, about, method).state_dict()
    check_tensors(tensors, wanted, f"{source}: {method.name}")
    part = _new_part(source, about, method)
    part.load_state_dict(tensors)
    return part.requires_grad_(False).eval()


def _new_part(source: str, about: Mapping[str, Any], method: Method) -> nn.Module:
    try:
        part: nn.Module = method.part(**about["settings"])
    except Exception as error:  # settings of any kind lead to any kind
        raise UserError(f"{source}: damaged, or from another version of {method.name} ({short(error, 160)})") from None
    return part


def training_command(method: str) -> str:
    """The command that trains the part of a method."""
    return get_method(method).recipe or "tokensieve train CONFIG"


def training_commands() -> str:
    """The commands that train the parts of all methods."""
    return " or ".join(dict.fromkeys(method.recipe for method in REGISTRY.values() if method.recipe))
