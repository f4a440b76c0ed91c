"""Replacing methods of one object so that it can be restored exactly, and capturing calls of a module in each thread."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tokensieve.errors import UserError

_NOTHING = object()


class Patch:
    """A function that is a hook of an object or replaces one of its methods.

    A copy of the object would still change the original, so an object with a patch cannot be copied or pickled. A patch that
    was taken off, but is held by a wrapper of somebody else, can.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.is_active = function, True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        if self.is_active:
            raise UserError("a model with a plan cannot be copied or saved whole; remove() the plan first")
        copied = Patch(copy.deepcopy(self.function, memo))
        copied.is_active = False
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_active:
            self.__deepcopy__({})
        return Patch, (self.function,), {"is_active": False}


_patches: WeakKeyDictionary[Any, dict[str, Patch]] = WeakKeyDictionary()  # the active ones of `replace`, by object and method


def is_patched(owner: Any, name: str) -> bool:
    """Whether `replace` has replaced this method, also if somebody has wrapped it since."""
    return name in _patches.get(owner, {})


def replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of this one object by a function; the returned function restores it.

    The function becomes a bound method with the signature of the original one, so that torch.compile can trace it. If somebody
    else has wrapped the method since (as PEFT, accelerate and torchao do), their wrapper stays, and what it calls is from then
    on the original method.
    """

    def method(patch: Patch, *args: Any, **kwargs: Any) -> Any:
        return patch.function(*args, **kwargs)

    stock = getattr(owner, name)
    signature = inspect.signature(stock)
    first = inspect.Parameter("_patch", inspect.Parameter.POSITIONAL_ONLY)
    others = [one for one in signature.parameters.values() if one.name != first.name]  # wrappers copy our signature
    method.__signature__ = signature.replace(parameters=[first, *others])  # type: ignore[attr-defined]
    method.__name__ = name
    patch, outer = Patch(function), _patches.get(owner, {}).get(name)
    undo = set_attribute(owner, name, MethodType(method, patch))
    _patches.setdefault(owner, {})[name] = patch

    def take_off() -> None:
        undo()
        patch.function, patch.is_active = stock, False
        if outer is None:
            _patches[owner].pop(name, None)
        else:
            _patches[owner][name] = outer

    return take_off


def set_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of this one object; the returned function restores it, unless somebody has set another value since."""
    before = owner.__dict__.get(name, _NOTHING)
    owner.__dict__[name] = value

    def undo() -> None:
        if owner.__dict__.get(name, _NOTHING) is not value:
            return
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
