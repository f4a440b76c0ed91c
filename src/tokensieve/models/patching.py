"""Replacing methods of one object so that it can be restored exactly, and capturing calls of a module in each thread."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple, NoReturn

from tokensieve.errors import UserError

_NOTHING = object()


class Patch:
    """A function that is a hook of an object or replaces one of its methods.

    A copy of the object would still change the original, so an object with a patch cannot be copied or pickled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UserError("a model with a plan cannot be copied or saved whole; remove() the plan first")

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__({})


def is_patched(owner: Any, name: str) -> bool:
    """Whether `replace` has replaced this method."""
    return isinstance(getattr(owner.__dict__.get(name), "__self__", None), Patch)


def replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of this one object by a function; the returned function restores it.

    The function becomes a bound method with the signature of the original one, so that torch.compile can trace it.
    """

    def method(patch: Patch, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(getattr(owner, name))
    first = inspect.Parameter("patch", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[first, *signature.parameters.values()]
    )
    method.__name__ = name
    return set_attribute(owner, name, MethodType(method, Patch(function)))


def set_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of this one object; the returned function restores it."""
    before = owner.__dict__.get(name, _NOTHING)
    owner.__dict__[name] = value

    def undo() -> None:
        if before is _NOTHING:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = before

    return undo


class PerThread(threading.local):
    """A value of each thread, None at first. Copies and pickles hold no value."""

    value: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PerThread:
        return PerThread()

    def __reduce__(self) -> tuple[type[PerThread], tuple[()]]:
        return PerThread, ()


class Captured(NamedTuple):
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class _Capture:
    """The capture of one module: a patch that all threads share, and the calls of each thread."""

    def __init__(self, owner: Any) -> None:
        self.users = 0
        self.calls = PerThread()  # a list while this thread captures
        stock = owner.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            out = stock(*args, **kwargs)
            if self.calls.value is not None:
                self.calls.value.append(Captured(args, kwargs, out))
            return out

        self.undo = replace(owner, "forward", forward)


_captures: dict[int, _Capture] = {}  # by the id of the module, while it is captured
_capturing = threading.RLock()


@contextmanager
def capture_calls(module: Any) -> Iterator[list[Captured]]:
    """The calls of a module inside the `with` block, of this thread only.

    (Not with a hook: torch iterates over the hooks of a module while another thread adds or removes one.)
    """
    with _capturing:
        capture = _captures.get(id(module)) or _Capture(module)
        _captures[id(module)] = capture
        capture.users += 1
    outer = capture.calls.value
    calls: list[Captured] = []
    capture.calls.value = calls
    try:
        yield calls
    finally:
        capture.calls.value = outer
        with _capturing:
            capture.users -= 1
            if not capture.users:
                del _captures[id(module)]
                capture.undo()
