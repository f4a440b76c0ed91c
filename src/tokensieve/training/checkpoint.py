"""Checkpoints that survive a kill at any moment: written aside, hashed, renamed; the last ones and the best are kept.

A checkpoint is a folder `step-00001200`, or `best`, with tensors.safetensors, state.json and manifest.json. The manifest holds
the SHA-256 of the other two and is written last, so a folder is either complete and verified or not a checkpoint. Nothing is
unpickled. Trained parts such as merger.safetensors lie in the same folder, for use with --weights. Plain state dicts for other
programs, such as `token_merger_step_1200.pt`, are written beside the folders (and into `best`) for the same steps. Neither is
read here.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokensieve.errors import UserError
from tokensieve.parts.checkpoints import BEST, TENSORS, state_dict_file, step_folder

KEPT = 2
_STATE, _MANIFEST = "state.json", "manifest.json"
_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"


class BrokenCheckpoint(ValueError):
    """A folder that differs from what was written: a file is missing, truncated or changed."""


@dataclass(frozen=True)
class Checkpoint:
    step: int  # steps done
    state: Any  # the argument of `save`
    folder: Path


StateDicts = Mapping[str, Mapping[str, Tensor]]
Contents = Mapping[str, bytes]


def save(
    run: Path,
    step: int,
    state: Any,
    exports: StateDicts | None = None,
    parts: Contents | None = None,
    keep: int | None = KEPT,
) -> Path:
    """Write `state` (nested dicts, lists, tuples of tensors and plain values) after `step` steps; drop older ones.

    Raises OSError when it cannot be written and FloatingPointError when a tensor is not finite; earlier checkpoints stay.
    The state dicts of `exports` are written first, so that every step that can be resumed has its own. parts: further files of
    the folder. keep: how many are kept, None: all. Newer ones are dropped too: the run went back to a step before them.
    """
    final = _prepare(run, step_folder(step))
    packed = _checked(step, state)
    for name, content in _exported(exports, step):
        aside = run / f"{_UNFINISHED}{name}"
        _write_synced(aside, content)
        aside.rename(run / name)
    _write(final, step, *packed, parts or {})
    done = [folder for folder in _folders(run) if _step_of(folder) <= step]
    kept = done if keep is None else done[-keep:]
    for other in (folder for folder in _folders(run) if folder not in kept):
        for name in exports or ():
            (run / state_dict_file(name, _step_of(other))).unlink(missing_ok=True)
        shutil.rmtree(other)
    return final


def save_best(run: Path, step: int, state: Any, exports: StateDicts | None = None, parts: Contents | None = None) -> Path:
    """Write the same as `save` into the folder `best`, in place of its earlier content."""
    final = _prepare(run, BEST)
    _write(final, step, *_checked(step, state), {**dict(_exported(exports, step)), **(parts or {})})
    return final


def other_files(run: Path) -> list[Path]:
    """Files of `save` and `save_best` other than checkpoints of steps: state dicts, and the best."""
    return [path for path in (*run.glob(state_dict_file("*", "*")), run / BEST) if path.exists()]


def clean_up(run: Path) -> None:
    """Remove what a kill left unfinished, and restore a folder whose replacement was not completed."""
    for old in run.glob(f"{_REPLACED}*"):
        final = run / old.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)
    for left_over in run.glob(f"{_UNFINISHED}*"):
        if left_over.is_dir():
            shutil.rmtree(left_over)
        else:
            left_over.unlink()


def _prepare(run: Path, name: str) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    clean_up(run)
    return run / name


def _checked(step: int, state: Any) -> tuple[Any, dict[str, Tensor]]:
    """The state as JSON values and tensors, which have to be finite."""
    tensors: dict[str, Tensor] = {}
    plain = _pack(state, "", tensors)
    bad = [name for name, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]
    if bad:
        raise FloatingPointError(f"step {step}: NaN or infinity in {', '.join(bad[:5])}; no checkpoint written")
    return plain, tensors


def _exported(exports: StateDicts | None, step: int) -> list[tuple[str, bytes]]:
    """File names and contents that `torch.load(..., weights_only=True)` reads."""
    files = []
    for name, tensors in (exports or {}).items():
        buffer = io.BytesIO()
        torch.save({key: value.detach().cpu().clone() for key, value in tensors.items()}, buffer)
        files.append((state_dict_file(name, step), buffer.getvalue()))
    return files


def _write(final: Path, step: int, plain: Any, tensors: dict[str, Tensor], files: Contents) -> None:
    """Write the folder aside, then rename it, replacing one that exists."""
    aside, old = final.with_name(f"{_UNFINISHED}{final.name}"), final.with_name(f"{_REPLACED}{final.name}")
    aside.mkdir()
    try:
        save_file(tensors, str(aside / TENSORS))
    except SafetensorError as error:  # raised when the disk is full
        raise OSError(f"{aside / TENSORS}: {error}") from error
    (aside / _STATE).write_text(json.dumps({"step": step, "state": plain}, allow_nan=False), encoding="utf-8")
    for name, content in files.items():
        _write_synced(aside / name, content)
    digests = {name: _digest(aside / name) for name in (TENSORS, _STATE)}
    (aside / _MANIFEST).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
    for path in (aside / TENSORS, aside / _STATE, aside / _MANIFEST, aside):
        _sync(path)
    if final.exists():
        final.rename(old)
    aside.rename(final)
    _sync(final.parent)
    if old.exists():
        shutil.rmtree(old)


def _write_synced(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync(path)


def load(folder: Path) -> Checkpoint:
    """Read one checkpoint, after its hashes have been checked."""
    try:
        digests = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        for name in (TENSORS, _STATE):
            if _digest(folder / name) != digests[name]:
                raise BrokenCheckpoint(f"{folder / name} differs from what was written (SHA-256)")
        content = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        tensors = load_file(str(folder / TENSORS))
        return Checkpoint(content["step"], _unpack(content["state"], tensors), folder)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, BrokenCheckpoint):
            raise
        raise BrokenCheckpoint(f"{folder}: {type(error).__name__}: {error}") from error


def latest(run: Path) -> tuple[Checkpoint | None, list[BrokenCheckpoint]]:
    """The newest intact checkpoint, or None; and the errors of newer ones that were skipped."""
    broken: list[BrokenCheckpoint] = []
    for folder in reversed(_folders(run)):
        try:
            return load(folder), broken
        except BrokenCheckpoint as error:
            broken.append(error)
    return None, broken


def at_step(run: Path, step: int) -> Checkpoint:
    """The checkpoint of a step; a UserError if there is none, or if it is broken."""
    folder = run / step_folder(step)
    if not folder.is_dir():
        steps = ", ".join(str(_step_of(folder)) for folder in _folders(run)) or "none"
        raise UserError(f"{run} has no checkpoint of step {step}; there are those of the steps {steps}")
    try:
        return load(folder)
    except BrokenCheckpoint as error:
        raise UserError(f"{error}; resume from another step") from None


def _folders(run: Path) -> list[Path]:
    return sorted(path for path in run.glob("step-*") if path.is_dir())


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"": ["tensor", name]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and key for key in value):
            return {key: _pack(item, f"{name}/{key}", tensors) for key, item in value.items()}
        return {"": ["pairs", [[key, _pack(item, f"{name}/{key}", tensors)] for key, item in value.items()]]}
    if isinstance(value, (list, tuple)):
        items = [_pack(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
        return {"": ["tuple", items]} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{name or 'state'}: {type(value).__name__} cannot go into a checkpoint")


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "" not in value:
        return {key: _unpack(item, tensors) for key, item in value.items()}
    kind, content = value[""]
    if kind == "tensor":
        return tensors[content]
    if kind == "pairs":
        return {key: _unpack(item, tensors) for key, item in content}
    return tuple(_unpack(item, tensors) for item in content)
