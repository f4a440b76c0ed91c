"""Outputs of a frozen vision tower on disk, so that each image is encoded once and not in every step, run and evaluation.

An entry is found by the content of the tokens that enter the first block, so whatever changes an image (its size, the
processor, the precision) leads to another entry. The weights are in the name of the folder. Every file starts with a checksum
of what follows; a damaged file counts as missing and is written again.

<folder>/<digest of the model, the type of its numbers and the blocks>/<first two digits>/<digest of the tokens>

While the cache is in use (`with cache:`), the blocks of the tower return what is stored, if every image of the batch is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokensieve.files import write_bytes
from tokensieve.models.patching import set_attribute
from tokensieve.models.tower import Tower, Undo
from tokensieve.provenance import digest

CHECKSUM = 16  # bytes


class TowerCache:
    """The outputs of the last block of a tower, by the inputs of its first block.

    Args:
        folder: where they are kept; None: nothing is stored or read.
        fingerprint: of the model's weights.
    """

    def __init__(self, folder: Path | None, tower: Tower | None, fingerprint: str) -> None:
        self.folder, self.tower, self.fingerprint = folder, tower, fingerprint
        self.hits = self.misses = 0  # images
        self._undo: list[Undo] = []
        self._paths: list[Path] = []  # of the images under way
        self._found: list[Tensor] | None = None  # their outputs, if all are stored

    def __enter__(self) -> TowerCache:
        if self.folder is not None and self.tower is not None:
            modules: list[Any] = [block.module for block in self.tower.blocks]
            last = len(modules) - 1
            self._undo = [
                set_attribute(module, "forward", self._forward(module.forward, number == 0, number == last))
                for number, module in enumerate(modules)
            ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._undo:
            self._undo.pop()()

    def _forward(self, stock: Callable[..., Tensor], is_first: bool, is_last: bool) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # (B, P+N, D)
            if is_first:
                self._look_up(hidden_states)
            if self._found is None:
                out = stock(hidden_states, *args, **kwargs)
                if is_last:
                    self._store(out)
                return out
            return torch.stack(self._found).to(hidden_states.device) if is_last else hidden_states

        return forward

    def _look_up(self, x: Tensor) -> None:
        assert self.folder is not None and self.tower is not None
        folder = self.folder / digest([self.fingerprint, str(x.dtype), list(x.shape[1:]), self.tower.depth])
        names = [hashlib.blake2b(_to_bytes(image), digest_size=20).hexdigest() for image in x]
        self._paths = [folder / name[:2] / name for name in names]
        found = [_read(path, image) for path, image in zip(self._paths, x, strict=True)]
        complete = [value for value in found if value is not None]
        self._found = complete if len(complete) == len(found) else None
        self.hits, self.misses = self.hits + len(complete), self.misses + len(found) - len(complete)

    def _store(self, out: Tensor) -> None:
        for path, image in zip(self._paths, out, strict=True):
            if not path.exists() or _read(path, image) is None:
                content = _to_bytes(image)
                write_bytes(path, _checksum(content) + content)


def _to_bytes(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=CHECKSUM).digest()


def _read(path: Path, like: Tensor) -> Tensor | None:
    """The stored output, of the shape and type of the tokens that led to it; None if it is missing or damaged."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    content = raw[CHECKSUM:]
    if len(content) != like.numel() * like.element_size() or raw[:CHECKSUM] != _checksum(content):
        return None
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8)).view(like.dtype).view(like.shape)
