"""Data sets of other packages open their images with Pillow themselves: inside `our_images`, they do it as all others here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import PIL.Image

from tokensieve.data.images import open_image

_ours = threading.local()
_lock = threading.RLock()
_users = 0
_stock: Any = None


@contextmanager
def our_images() -> Iterator[None]:
    """PIL.Image.open is open_image in this thread: RGB, or a BrokenImage."""
    global _users, _stock
    with _lock:
        if not _users:
            _stock, PIL.Image.open = PIL.Image.open, _open  # type: ignore[assignment]
        _users += 1
    outer = getattr(_ours, "value", False)
    _ours.value = True
    try:
        yield
    finally:
        _ours.value = outer
        with _lock:
            _users -= 1
            if not _users:
                PIL.Image.open = _stock


def _open(source: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(_ours, "value", False):
        return open_image(source)
    return _stock(source, *args, **kwargs)
