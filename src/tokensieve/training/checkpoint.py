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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokensieve.errors import UserError, short
from tokensieve.files import open_regular, read_json
from tokensieve.parts.checkpoints import BEST, TENSORS, state_dict_file, step_folder, step_folders
from tokensieve.parts.header import MAX_HEADER

KEPT = 2
MAX_STATE = 1 << 30  # bytes of the state that is not tensors
_STATE, _MANIFEST = "state.json", "manifest.json"
_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"


class BrokenCheckpoint(UserError):
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
    with _cleaned_up(run):
        for name, content in _exported(exports, step):
            aside = run / f"{_UNFINISHED}{name}"
            _write_synced(aside, content)
            aside.rename(run / name)
        _write(final, step, *packed, parts or {})
    folders = step_folders(run)
    done = [other for other in folders if other <= step]
    kept = done if keep is None else done[-keep:]
    for other in folders.keys() - set(kept):
        for name in exports or ():
            (run / state_dict_file(name, other)).unlink(missing_ok=True)
        _remove(folders[other])
    return final


def save_best(run: Path, step: int, state: Any, exports: StateDicts | None = None, parts: Contents | None = None) -> Path:
    """Write the same as `save` into the folder `best`, in place of its earlier content."""
    final = _prepare(run, BEST)
    packed = _checked(step, state)
    with _cleaned_up(run):
        _write(final, step, *packed, {**dict(_exported(exports, step)), **(parts or {})})
    return final


def other_files(run: Path) -> list[Path]:
    """Files of `save` and `save_best` other than checkpoints of steps: state dicts, and the best."""
    return [path for path in (*run.glob(state_dict_file("*", "*")), run / BEST) if path.exists()]


def clean_up(run: Path) -> None:
    """Remove what a kill left unfinished, and restore a folder whose replacement was not completed."""
    for old in run.glob(f"{_REPLACED}*"):
        final = run / old.name.removeprefix(_REPLACED)
        if final.exists():
            _remove(old)
        else:
            old.rename(final)
    for left_over in run.glob(f"{_UNFINISHED}*"):
        _remove(left_over)


def _remove(path: Path) -> None:
    """Remove a folder, a file, or a link, but not what the link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def _cleaned_up(run: Path) -> Iterator[None]:
    """Leave nothing unfinished on a disk that is full."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            clean_up(run)
        raise


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
    text = json.dumps({"step": step, "state": plain}, allow_nan=False)
    if len(text) > MAX_STATE:
        raise OSError(f"{aside / _STATE}: {len(text):,} characters, more than {MAX_STATE:,} could not be read again")
    (aside / _STATE).write_text(text, encoding="utf-8")
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
        _remove(old)


def _write_synced(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync(path)


def load(folder: Path) -> Checkpoint:
    """Read one checkpoint, after its hashes have been checked."""
    try:
        digests = read_json(folder / _MANIFEST, MAX_HEADER)
        for name in (TENSORS, _STATE):
            if _digest(folder / name) != digests[name]:
                raise BrokenCheckpoint(f"{short(folder / name, 300)} differs from what was written (SHA-256)")
        content = read_json(folder / _STATE, MAX_STATE)
        step, tensors = content["step"], load_file(str(folder / TENSORS))
        if type(step) is not int or step < 0 or folder.name not in (BEST, step_folder(step)):
            raise BrokenCheckpoint(f"{short(folder, 300)} holds the step {short(step)}")
        return Checkpoint(step, _unpack(content["state"], tensors), folder)
    except BrokenCheckpoint:
        raise
    except Exception as error:  # files of any content lead to any kind: SafetensorError, KeyError, RecursionError, MemoryError
        raise BrokenCheckpoint(f"{short(folder, 300)}: {type(error).__name__}: {short(error, 200)}") from error


def latest(run: Path) -> tuple[Checkpoint | None, list[BrokenCheckpoint]]:
    """The newest intact checkpoint, or None; and the errors of newer ones that were skipped."""
    broken: list[BrokenCheckpoint] = []
    for folder in reversed(step_folders(run).values()):
        try:
            return load(folder), broken
        except BrokenCheckpoint as error:
            broken.append(error)
    return None, broken


def at_step(run: Path, step: int) -> Checkpoint:
    """The checkpoint of a step; a UserError if there is none, or if it is broken."""
    folder = run / step_folder(step)
    if not folder.is_dir():
        steps = ", ".join(map(str, step_folders(run))) or "none"
        raise UserError(f"{run} has no checkpoint of step {step}; there are those of the steps {steps}")
    try:
        return load(folder)
    except BrokenCheckpoint as error:
        raise UserError(f"{error}; resume from another step") from None


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as (file, _):
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
