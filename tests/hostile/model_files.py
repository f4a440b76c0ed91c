"""Damaged and malicious state dicts and re-identification models: what was saved, or a refusal; never code, or much memory."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickle
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.hostile.attack import Attack, refused
from tests.hostile.limits import Evil, check_limits
from tests.hostile.mutate import flip_bit, mutate_bytes
from tests.hostile.mutate_json import change_json
from tokensieve.methods.registry import get_method
from tokensieve.parts import header, resolve
from tokensieve.parts.files import describe_part, pack_part, part_checksum
from tokensieve.reid import loading as reid_loading
from tokensieve.reid.build import build
from tokensieve.reid.model import Settings
from tokensieve.testing import fresh_part

# ------------------------------------------------------------------------------------------------------------ state dicts


def _torch_bytes(value: Any, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def _pickle_bytes(rng: random.Random) -> bytes:
    """A program of a pickle: opcodes and arguments in any order."""
    pieces = (
        *(
            b"(",
            b")",
            b"]",
            b"}",
            b"t",
            b"u",
            b"s",
            b"R",
            b"b",
            b"2",
            b"0",
            b"N",
            b"a",
            b"e",
            b"\x85",
            b"\x86",
            b"\x87",
            b"\x93",
        ),
        *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"cos\nsystem\n", b"ctorch\nFloatStorage\n"),
        *(
            b"cbuiltins\neval\n",
            b"ctorch._utils\n_rebuild_sparse_tensor\n",
            b"ctorch\nSize\n",
            b"ctorch._utils\n_rebuild_parameter\n",
        ),
        *(
            b"K\x01",
            b"J\xff\xff\xff\x7f",
            b"\x8a\x08" + b"\x7f" * 8,
            b"X\x01\x00\x00\x00a",
            b"X\xff\xff\xff\x7fa",
            b"q\x00",
            b"h\x00",
        ),
        *(b"Q", b"X\x07\x00\x00\x00storage", b"X\x01\x00\x00\x000", b"X\x03\x00\x00\x00cpu", b"B\xff\xff\xff\x7f", b"I99999\n"),
    )
    return b"\x80\x02" + b"".join(rng.choice(pieces) for _ in range(rng.randrange(40))) + b"."


def _archive(rng: random.Random, program: bytes) -> bytes:
    """An archive as torch writes it, with another pickle or other records."""
    made = io.BytesIO()
    kind = rng.choice((zipfile.ZIP_STORED,) * 4 + (zipfile.ZIP_DEFLATED,))
    with zipfile.ZipFile(made, "w", kind) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", rng.choice((b"little", b"big", b"x" * 100)))
        archive.writestr("archive/data/0", bytes(rng.choice((0, 4, 24, 1000, 10**8 if kind == zipfile.ZIP_DEFLATED else 4))))
        archive.writestr("archive/version", b"3\n")
    return made.getvalue()


def _huge(rng: random.Random, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state dict with tensors that are more than they seem, or none."""
    name = rng.choice(sorted(state))
    shape = rng.choice(((10**6, 10**6), tuple(state[name].shape)))
    values: dict[str, Callable[[], Any]] = {
        "expanded": lambda: torch.ones(()).expand(shape),
        "sparse": lambda: torch.sparse_coo_tensor(torch.zeros(len(shape), 1, dtype=torch.long), torch.ones(1), shape),
        "meta": lambda: torch.empty(shape, device="meta"),
        "number": lambda: rng.choice((3, None, "x", [torch.ones(2)], {"a": torch.ones(1)})),
        "complex": lambda: state[name].to(torch.complex64),
        "nan": lambda: state[name] * float("nan"),
    }
    return {**state, name: values[rng.choice(sorted(values))]()}


def _state_dict(rng: random.Random, folder: Path) -> None:
    part = fresh_part(get_method("learned"), 128)
    state = part.state_dict()
    (folder / "step-00000003").mkdir()
    (folder / "step-00000003" / "learned.safetensors").write_bytes(_part())
    path = folder / "learned_step_3.pt"
    if rng.random() < 0.5:
        content = rng.choice(
            (
                mutate_bytes(rng, _torch_bytes(state)),
                flip_bit(rng, _torch_bytes(state)),
                flip_bit(rng, _torch_bytes(state)[::-1], 2000)[::-1],
            )
        )
        wanted = True
    else:
        evil = {**state, "x": Evil()}
        content = rng.choice(
            (
                lambda: _archive(rng, _pickle_bytes(rng)),
                lambda: _torch_bytes(_huge(rng, state)),
                lambda: _torch_bytes(rng.choice((evil, Evil(), [Evil()]))),
                lambda: _torch_bytes(state, zipped=False),
                lambda: _torch_bytes(evil, zipped=False),
                lambda: pickle.dumps(Evil()),
                lambda: _pickle_bytes(rng),
                lambda: struct.pack("<Q", 2**63) + rng.randbytes(100),
            )
        )()
        wanted = False
    path.write_bytes(content)

    def read() -> None:
        loaded: list[Any] = []
        if refused(lambda: loaded.append(resolve.read_weights(str(path)))) is None:
            assert wanted and part_checksum(loaded[0]["learned"].part) == part_checksum(part), "other tensors"

    check_limits(read)


@functools.cache
def _part() -> bytes:
    part, signed = fresh_part(get_method("learned"), 128), {"tower": [1.5, None]}
    return pack_part(part, describe_part("learned", part, signed, {"model": "one"}))


# ------------------------------------------------------------------------------------------- re-identification models


@functools.cache
def _reid() -> tuple[Any, str, dict[str, bytes]]:
    torch.manual_seed(0)
    sizes = {"patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = build(Settings("timm", "vit_tiny_patch16_224", (64, 32), arguments=sizes, cameras=2, plan="sdtps@out"))
    with tempfile.TemporaryDirectory() as folder:
        reid_loading.save(model, Path(folder))
        return model.settings, part_checksum(model), {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _reid_folder(rng: random.Random, folder: Path) -> None:
    settings, right, contents = _reid()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    config: Any = json.loads(contents["config.json"])
    kind = rng.randrange(4)
    path = folder / rng.choice(("config.json", "model.safetensors"))
    if kind == 0:  # settings of any kind, with the right checksum
        del config["sha256"]
        config = change_json(rng, config)
        for name in ("checkpoint_path", "pretrained_cfg", "attn_implementation", "embed_dim", "depth", "act_layer", "img_size"):
            if rng.random() < 0.05 and isinstance(config, dict) and isinstance(config.get("arguments"), dict):
                value = rng.choice((str(folder / "x.pt"), 10**6, 10**4, {"file": str(folder / "x.pt")}, "user/kernel"))
                config["arguments"] = {**config["arguments"], name: value}
        (folder / "x.pt").write_bytes(pickle.dumps({"state_dict": Evil()}))
        if isinstance(config, dict):
            with contextlib.suppress(ValueError, RecursionError):
                config["sha256"] = header.checksum(config, [contents["model.safetensors"]])
        (folder / "config.json").write_text(json.dumps(config))
    elif kind == 1:
        path.write_bytes(flip_bit(rng, path.read_bytes()))
    elif kind == 2:
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
    else:
        path.unlink()
        rng.choice((path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to(path), lambda: path.touch()))()

    def read() -> None:
        loaded: list[Any] = []
        if refused(lambda: loaded.append(reid_loading.read(str(folder)))) is None:
            assert part_checksum(loaded[0]) == right, "other tensors"
            assert kind == 0 or loaded[0].settings == settings, "other settings"

    check_limits(read)


ATTACKS = (
    Attack("state dicts", "damaged and malicious files of torch.save", _state_dict, short=150, seconds=10),
    Attack("reid models", "damaged and forged re-identification models", _reid_folder, per_thousand=500, short=40, seconds=30),
)
