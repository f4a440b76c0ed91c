"""Files of tensors, read without running any code of theirs: safetensors, and what torch.save wrote.

A file is read whole before anything in it is used, so a file that changes while it is read, or that is a pipe, does no harm.
"""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensieve.errors import UserError, short
from tokensieve.files import open_regular, read_bytes

MAX_BYTES = 1 << 33  # of a file
MAX_TABLE = 1 << 24  # of the names and places of tensors
METADATA = "__metadata__"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # the types in which the weights of a float module may be stored


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; a UserError if it is none."""
    content = read_content(path)
    return parse_safetensors(content, short(path, 200))


def read_content(path: str | Path) -> bytes:
    """The bytes of a safetensors file. Its length is compared with its header first, so nothing else is read into memory."""
    source = short(path, 200)
    with open_regular(path, MAX_BYTES) as (file, size):
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(MAX_TABLE, size - 8):
            raise UserError(f"{source}: damaged, or not a safetensors file (it has no header)")
        table = file.read(length)
        content = start + table
        if (wanted := len(content) + _data_length(table, source)) != size:
            raise UserError(f"{source}: damaged, or not a safetensors file (it has {size:,} bytes, its header says {wanted:,})")
        return content + file.read(size - len(content))


def _data_length(table: bytes, source: str) -> int:
    """Where the last tensor ends."""
    try:
        tensors = [about for name, about in json.loads(table).items() if name != METADATA]
        return max((int(about["data_offsets"][1]) for about in tensors), default=0)
    except Exception as error:  # JSON of any form
        raise UserError(f"{source}: damaged, or not a safetensors file ({short(error, 120)})") from None


def parse_safetensors(content: bytes, source: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of the bytes of a safetensors file. source: where they come from, for messages."""
    from safetensors.torch import load

    try:
        tensors = load(content)
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get(METADATA) or {}
    except Exception as error:  # the readers raise many kinds for damaged bytes: SafetensorError, KeyError, MemoryError, ...
        raise UserError(f"{source}: damaged, or not a safetensors file ({short(error, 120)})") from None
    return tensors, metadata


def read_torch(path: str | Path) -> Any:
    """What torch.save wrote, by torch's restricted reader, which runs no code; a UserError for damage and for code."""
    source, content = short(path, 200), read_bytes(path, MAX_BYTES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about sparse tensors: only plain ones are used
            return torch.load(_checked_archive(content), map_location="cpu", weights_only=True)
    except Exception as error:  # malicious pickles lead to any kind
        raise UserError(f"{source}: damaged, or not tensors that torch.save wrote ({short(error, 120)})") from None


def _checked_archive(content: bytes) -> io.BytesIO:
    """The archive with the same records, whose checksums are right; a ValueError if one is not.

    torch does not compare checksums. Of a record with damaged attributes it gives memory that was never written to, and it
    unpacks compressed ones, whatever size they say they have.
    """
    checked = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(checked, "w") as copy:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("it is compressed")
        if sum(record.file_size for record in records) > len(content) or len(set(archive.namelist())) < len(records):
            raise ValueError("its records overlap")
        for record in records:
            copy.writestr(record.filename, archive.read(record))  # which compares the checksum
    checked.seek(0)
    return checked


def tensor_blocks(tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    """Names, types, shapes and values, for checksums."""
    for name, value in sorted(tensors.items()):
        yield f"{name} {value.dtype} {tuple(value.shape)}".encode()
        yield value.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def check_tensors(tensors: Mapping[str, Any], wanted: Mapping[str, Tensor], source: str) -> None:
    """A UserError unless these are the tensors that a module wants: names, shapes and types, and all values finite.

    Weights of a float module may be float32, float16 or bfloat16, which it holds exactly.
    """
    for what, names in (("lacks", wanted.keys() - tensors.keys()), ("has the unknown", tensors.keys() - wanted.keys())):
        if names:
            raise UserError(f"{source}: it {what} {_some(names)}; it is damaged, or from another version")
    for name, target in wanted.items():
        value = tensors[name]
        if not is_plain(value):
            raise UserError(f"{source}: {name} is not a plain tensor; it is damaged, or from another version")
        if value.shape != target.shape:
            shapes = f"{tuple(value.shape)}, not {tuple(target.shape)}"
            raise UserError(f"{source}: {name} is {shapes}; it is damaged, or from another version")
        allowed = FLOATS if target.dtype == torch.float32 else (target.dtype,)
        if value.dtype not in allowed:
            types = " or ".join(map(_type_name, allowed))
            raise UserError(f"{source}: {name} is of type {_type_name(value.dtype)}, not {types}")
        if not bool(torch.isfinite(value).all()):
            raise UserError(f"{source}: {name} holds NaN or infinity; train it again with a lower learning rate")


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor in memory that holds all of its elements: not sparse, quantised, nested or expanded."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        return False
    is_whole = value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    return bool(value.device.type == "cpu" and is_whole and not value.is_nested)


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: set[str]) -> str:
    shown = [short(name, 60) for name in sorted(map(str, names))]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
