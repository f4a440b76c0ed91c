"""Damaged and malicious checkpoints: the state that was saved, bit for bit, of an intact one; never another error."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from tests.hostile.attack import Attack, check_message, refused
from tests.hostile.mutate import flip_bit, mutate_bytes, mutate_text
from tests.support.states import same
from tokensieve.training import checkpoint

NAMES = ("tensors.safetensors", "state.json", "manifest.json")
STEPS = (3, 7, 12)
FOLDERS = ("step-abc", "step-", "step-99999999999999999999", "step-00000099", "step-٣٣٣٣٣٣٣٣", "step-1", "step-00000012 (copy)")
STATES = (
    *(
        "",
        "3",
        "null",
        "[]",
        "{}",
        "[" * 100_000,
        '{"step":' * 5000,
        "NaN",
        '{"step": 12}',
        '{"state": {}}',
        "\x00",
        "9" * 5000,
    ),
    *(
        '{"step": -1, "state": {}}',
        '{"step": 1e400, "state": {}}',
        '{"step": true, "state": {}}',
        '{"step": "12", "state": {}}',
    ),
    *('{"step": 13, "state": {}}', '{"step": 12, "state": {"": 3}}', '{"step": 12, "state": {"": ["tensor", "none"]}}'),
    *('{"step": 12, "state": {"": ["pairs", 3]}}', '{"step": 12, "state": {"": ["pairs", [[{}, 1]]]}}'),
    '{"step": 12, "state": ' + '{"": ["tuple", [' * 900 + "]]}" * 900 + "}",
)


def _state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "learner": {"weight": torch.randn(3, 4, generator=generator), "count": torch.tensor(step)},
        "optimizer": {0: {"step": step, "velocity": torch.ones(2) * step}, "betas": (0.9, 0.98)},
        "progress": {"best": None, "recent": [1.0, float(step)], "text": "ü"},
    }


@functools.cache
def _saved() -> dict[str, bytes]:
    """The files of a run with three checkpoints and the best one, by their paths in it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        for step in STEPS:
            more = {"maker": {"x": torch.ones(2)}}, {"part.safetensors": b"part"}
            checkpoint.save(run, step, _state(step), *more, keep=None)
        checkpoint.save_best(run, 7, _state(7))
        return {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def _damage(rng: random.Random, folder: Path) -> None:
    """Damages one checkpoint."""
    path = folder / rng.choice(NAMES)
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: path.write_bytes(mutate_bytes(rng, path.read_bytes())),
        lambda: path.write_bytes(flip_bit(rng, path.read_bytes())),
        lambda: path.write_text(mutate_text(rng, rng.choice(STATES)), errors="replace"),
        lambda: _replace(rng, path),
        lambda: _forge(rng, folder),
        lambda: path.write_bytes(_saved()[f"step-{rng.choice(STEPS):08d}/{path.name}"]),
    )
    rng.choice(kinds)()


def _replace(rng: random.Random, path: Path) -> None:
    """The file is gone, or something else is in its place."""
    path.unlink()
    rng.choice(
        (
            lambda: None,
            path.mkdir,
            path.touch,
            lambda: os.mkfifo(path),
            lambda: path.symlink_to(path),
            lambda: path.symlink_to("/dev/zero"),
            lambda: path.write_bytes(pickle.dumps({"x": 1})),
            lambda: torch.save({"x": torch.ones(2)}, path),
        )
    )()


def _forge(rng: random.Random, folder: Path) -> None:
    """Another state or other tensors, with the right hashes."""
    if rng.random() < 0.7:
        (folder / "state.json").write_text(rng.choice(STATES))
    else:
        (folder / "tensors.safetensors").write_bytes(rng.choice((b"", b"x" * 100, save({}), save({"x": torch.ones(2)}))))
    digests: Any = {name: checkpoint._digest(folder / name) for name in NAMES[:2]}
    if rng.random() < 0.2:
        digests = rng.choice(([], 3, None, {}, {"state.json": digests["state.json"]}, dict.fromkeys(digests, 3)))
    (folder / "manifest.json").write_text(json.dumps(digests))


def _one_try(rng: random.Random, folder: Path) -> None:
    run = folder / "run"
    for name, content in _saved().items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
    damaged = rng.sample(STEPS, rng.randrange(1, 4))
    for step in damaged:
        for _ in range(rng.choice((1, 1, 2))):
            _damage_if_there(rng, run / f"step-{step:08d}")
    for name in rng.sample(FOLDERS, rng.randrange(3)):
        rng.choice(((run / name).mkdir, (run / name).touch, lambda name=name: (run / name).symlink_to(run)))()
    found, broken = checkpoint.latest(run)
    for error in broken:
        check_message(str(error))
    intact = [step for step in STEPS if step not in damaged]
    assert found is not None or not intact, "an intact checkpoint was not found"
    assert found is None or not intact or found.step >= max(intact), "an older one was taken"
    if found is not None:
        assert same(found.state, _state(found.step)), "another state"
    for step in STEPS:
        assert refused(lambda step=step: _read(run, step)) is None or step in damaged
    checkpoint.save(run, 20, _state(20), keep=2)  # goes on whatever lies around
    assert same(checkpoint.load(run / "step-00000020").state, _state(20))


def _read(run: Path, step: int) -> None:
    assert same(checkpoint.at_step(run, step).state, _state(step)), "another state"


def _damage_if_there(rng: random.Random, folder: Path) -> None:
    if all((folder / name).is_file() and not (folder / name).is_symlink() for name in NAMES):
        _damage(rng, folder)


ATTACKS = (Attack("checkpoints", "damaged and forged checkpoints of a run", _one_try, short=40, seconds=20),)
