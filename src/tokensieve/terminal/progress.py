"""Progress bars on standard error, with the time that is left. There are none where standard error is no terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

_hidden: ContextVar[bool] = ContextVar("progress is hidden", default=False)


@contextmanager
def hidden(is_hidden: bool = True) -> Iterator[None]:
    """No bars inside the block, as --quiet asks for."""
    token = _hidden.set(is_hidden or _hidden.get())
    try:
        yield
    finally:
        _hidden.reset(token)


def bar(over: Iterable[Any] | None = None, *, quiet: bool = False, **options: Any) -> tqdm[Any]:
    """A bar over values, or for `total` steps that `update` counts. options: those of tqdm."""
    from tqdm import tqdm

    is_hidden = quiet or _hidden.get()
    return tqdm(over, disable=True if is_hidden else None, dynamic_ncols=True, **options)  # None: if it is no terminal
