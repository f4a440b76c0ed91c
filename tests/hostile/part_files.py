"""Damaged and malicious files of weights: what was saved, or a refusal; never other numbers, code, or much memory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from tests.hostile.attack import Attack, refused
from tests.hostile.limits import check_limits
from tests.hostile.mutate import flip_bit, mutate_bytes, mutate_text
from tests.hostile.mutate_json import change_json
from tokensieve import Plan, Reducers
from tokensieve.methods.registry import get_method
from tokensieve.models import loading
from tokensieve.parts import files as part_files
from tokensieve.parts import folders, header, resolve, tensor_files
from tokensieve.testing import fresh_part

PLAN = "learned@4:32"
PARTS = {
    "learned": {"width": 8},
    "merger": {"width": 8, "question_width": 12, "kind": "question_aware", "hidden": 8, "keep": 3},
    "cross": {"width": 8, "layers": [1, 3], "d_internal": 8, "heads": 2, "keep": [3, 2], "arriving": 5},
    "sdtps": {"width": 8, "patches": 16, "modalities": ["RGB", "NI"]},
}


@functools.cache
def part_file(method: str) -> bytes:
    torch.manual_seed(0)
    part = get_method(method).part(**PARTS[method])
    about = part_files.describe_part(method, part, {"tower": [1.5, 2.25, None]}, {"model": "one", "steps": 3})
    return part_files.pack_part(part, about)


def _first_form(content: bytes) -> bytes:
    """The same part in a file of the first form."""
    tensors, metadata = tensor_files.parse_safetensors(content, "x")
    about = json.loads(metadata[part_files.HEADER]) | {"format": part_files.FIRST_FORMAT}
    about["sha256"] = part_files.part_checksum(tensors)
    return save(tensors, metadata={part_files.HEADER: json.dumps(about)})


def _state(part: torch.nn.Module) -> str:
    return part_files.part_checksum(part)


def _read(path: Path, right: str | None, about: dict[str, Any] | None = None) -> None:
    """Reads a part: what was saved, or a refusal. right: the checksum of the tensors; None: it has to be refused."""
    read: list[Any] = []
    if refused(lambda: read.append(part_files.read_part(path))) is None:
        assert right is not None and _state(read[0].part) == right, "other tensors"
        assert about is None or read[0].about == about, "another header"


# ------------------------------------------------------------------------------------------------------------ part files


def _damaged(rng: random.Random, folder: Path) -> None:
    """A part with bits flipped, or mutated in any way."""
    whole, path = part_file(rng.choice(list(PARTS))), folder / "x.safetensors"
    path.write_bytes(whole)
    right = part_files.read_part(path)
    for _ in range(20):
        length = 8 + int.from_bytes(whole[:8], "little")
        flipped = flip_bit(rng, whole, length if rng.random() < 0.8 else None)  # most of them in the header
        path.write_bytes(flipped if rng.random() < 0.7 else mutate_bytes(rng, whole))
        _read(path, _state(right.part), right.about)


def _forged(rng: random.Random, folder: Path) -> None:
    """A part whose header or tensors say anything, with the right checksum."""
    method = rng.choice(list(PARTS))
    tensors, metadata = tensor_files.parse_safetensors(part_file(method), "x")
    about: Any = json.loads(metadata[part_files.HEADER])
    del about["sha256"]
    about["format"] = rng.choice((part_files.FORMAT, part_files.FORMAT, part_files.FIRST_FORMAT))
    for _ in range(rng.randrange(3)):
        about = change_json(rng, about)
    for _ in range(rng.randrange(3)):
        tensors = _change_tensors(rng, tensors)
    path = folder / "x.safetensors"
    path.write_bytes(_sealed(rng, about, tensors))
    check_limits(lambda: _read_any(path, method))


def _change_tensors(rng: random.Random, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = rng.choice(sorted(tensors)) if tensors else "x"
    value = tensors.get(name, torch.ones(2))
    kinds = (
        torch.int8,
        torch.int64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float64,
        torch.float16,
        torch.bool,
        torch.uint16,
    )
    changed: dict[str, Callable[[], torch.Tensor]] = {
        "type": lambda: value.to(rng.choice(kinds)),
        "shape": lambda: value.reshape(-1)[: rng.randrange(3)].clone(),
        "nan": lambda: _filled(value, rng.choice((float("nan"), float("inf")))) if value.is_floating_point() else value,
        "flat": lambda: value.reshape(-1).clone(),
        "empty": lambda: torch.empty(0, 10**6),
    }
    others = {key: tensor for key, tensor in tensors.items() if key != name or rng.random() < 0.8}
    return {**others, rng.choice((name, name, name, "x", "a.b")): changed[rng.choice(sorted(changed))]().clone()}


def _filled(value: torch.Tensor, bad: float) -> torch.Tensor:
    """A tensor like this one, all NaN or infinite. float8_e4m3fn has no infinity; as in any cast to it, that is NaN."""
    return torch.full(value.shape, bad).to(value.dtype)


def _sealed(rng: random.Random, about: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    text = json.dumps(about)
    if isinstance(about, dict):
        try:
            old = about.get("format") == part_files.FIRST_FORMAT
            blocks = tensor_files.tensor_blocks(tensors)
            checksum = part_files.part_checksum(tensors) if old else header.checksum(about, blocks)
            text = json.dumps({**about, "sha256": checksum})
        except (ValueError, RecursionError):  # NaN: no checksum is right
            pass
    return save(tensors, metadata={rng.choice((part_files.HEADER,) * 9 + ("x",)): text})


def _read_any(path: Path, method: str) -> None:
    """Reads a part that may be good in its own way: then it has finite weights, and settings that build it."""
    read: list[Any] = []
    if refused(lambda: read.append(part_files.read_part(path))) is not None:
        return
    part, about = read[0].part, read[0].about
    assert all(bool(value.isfinite().all()) for value in part.state_dict().values())
    assert isinstance(about["method"], str) and type(part) is get_method(about["method"]).part
    assert all(norm is None or 0 <= norm < float("inf") for norm in about["tower"])


def _weights(rng: random.Random, folder: Path) -> None:
    """Anything as weights of a plan."""
    (folder / "folder.safetensors").mkdir()
    (folder / "a_step_3.pt").mkdir()
    os.mkfifo(folder / "pipe.safetensors")
    os.mkfifo(folder / "b_step_3.pt")
    (folder / "empty.safetensors").touch()
    with (folder / "sparse.safetensors").open("wb") as file:
        file.truncate(rng.choice((10 << 30, 3 << 30)))
    part = fresh_part(get_method("learned"), 128)
    values = [
        *(
            3,
            2.5,
            True,
            b"x",
            object(),
            {3},
            [3],
            [None],
            ["", 3],
            {"learned": 3},
            {3: part},
            {"lerned": part},
            {"": part},
            iter(()),
        ),
        *(
            "",
            " ",
            "x",
            "x/y",
            "a/b/c",
            "\0",
            "a\0b/c",
            "x" * 5000,
            "x/" * 3000,
            "~",
            "..",
            "/",
            "\n",
            "\x1b[31m",
            "\ud800",
            "C:\\x",
        ),
        *(
            "a.safetensors",
            "a.pt",
            "a_step_9.pt",
            f"a_step_{'9' * 400}.pt",
            "a_step_٣.pt",
            "x" * 300 + ".safetensors",
            "a/b.pt",
        ),
        *(folder, folder / "folder.safetensors", folder / "pipe.safetensors", folder / "empty.safetensors"),
        *(folder / "a_step_3.pt", folder / "b_step_3.pt", folder / "sparse.safetensors", Path("/dev/zero"), Path("/dev/null")),
    ]
    value = rng.choice(values)
    value = [value, value] if rng.random() < 0.2 else value
    assert refused(lambda: resolve.load_parts(Plan.parse(PLAN), _model(), value)) is not None
    if not isinstance(value, (str, Path)) or rng.random() < 0.5:
        assert refused(lambda: Reducers.from_pretrained(value)) is not None


@functools.cache
def _model() -> torch.nn.Module:
    return loading.load("sieve-vit-8", "scenes-v1").model.requires_grad_(False)


# --------------------------------------------------------------------------------------------------- folders of reducers


@functools.cache
def _reducers() -> tuple[Reducers, dict[str, bytes]]:
    made = Reducers.of(_model(), PLAN, {"learned": fresh_part(get_method("learned"), 128)}, measured={"acc1": 0.5})
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        return made, {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _reducers_folder(rng: random.Random, folder: Path) -> None:
    made, contents = _reducers()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    path = folder / rng.choice(("config.json", "config.json", "learned.safetensors"))
    if path.suffix == ".json" and rng.random() < 0.5:
        config = change_json(rng, json.loads(path.read_bytes()))
        if isinstance(config, dict):
            config.pop("sha256", None)
            with contextlib.suppress(ValueError):
                config = rng.choice((config, folders.seal_config(config)))
        path.write_text(json.dumps(config))
    elif rng.random() < 0.5:
        for _ in range(20):
            path.write_bytes(flip_bit(rng, contents[path.name], 3000))
            _same_or_refused(made, folder)
        return
    elif rng.random() < 0.2:
        path.unlink()
        rng.choice((path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to(path)))()
    elif rng.random() < 0.5:
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
    else:
        path.write_text(mutate_text(rng, contents["config.json"].decode()), encoding="utf-8", errors="replace")
    read: list[Reducers] = []
    if refused(lambda: read.append(Reducers.from_pretrained(folder))) is None:
        assert _state(read[0]["learned"]) == _state(made["learned"]) and str(read[0].plan)
        repr(read[0])
        read[0].card()
        refused(lambda: read[0].save_pretrained(folder / "again"))
    refused(lambda: resolve.load_parts(Plan.parse(PLAN), _model(), folder))


def _same_or_refused(made: Reducers, folder: Path) -> None:
    read: list[Reducers] = []
    if refused(lambda: read.append(Reducers.from_pretrained(folder))) is None:
        again = read[0]
        assert (
            again.config() == made.config() and again.plan == made.plan and _state(again["learned"]) == _state(made["learned"])
        )


def _first(rng: random.Random, folder: Path) -> None:
    """Files of the first form: their tensors are covered, and no content leads to another error."""
    whole, path = _first_form(part_file(rng.choice(list(PARTS)))), folder / "x.safetensors"
    path.write_bytes(whole)
    right = _state(part_files.read_part(path).part)
    for _ in range(10):
        path.write_bytes(mutate_bytes(rng, whole) if rng.random() < 0.5 else flip_bit(rng, whole))
        _read(path, right)


ATTACKS = (
    Attack("part files", "20 damaged files of trained parts a try", _damaged, short=40, seconds=20),
    Attack("forged parts", "headers and tensors that say anything, with the right checksum", _forged, short=250, seconds=10),
    Attack("old parts", "10 damaged files of the first form a try", _first, per_thousand=200, short=20, seconds=10),
    Attack("weights", "anything as weights=", _weights, short=100, seconds=10),
    Attack("reducers", "damaged and forged folders of reducers", _reducers_folder, short=100, seconds=10),
)
