"""Replacing methods of one object so that it can be restored exactly, and capturing calls of a module in each thread."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from tokensieve.errors import UserError, short
from tokensieve.models.wrapped import NO_REPLICAS

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
            _refuse_copy()
        copied = Patch(copy.deepcopy(self.function, memo))
        copied.is_active = False
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_active:
            _refuse_copy()
        return Patch, (self.function,), {"is_active": False}


_patched: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()  # methods that are replaced now, by object


def is_patched(owner: Any, name: str) -> bool:
    """Whether `replace` has replaced this method, also if somebody has wrapped it since."""
    return _patched.get(owner, Counter())[name] > 0


def replace(owner: Any, name: str, function: Callable[..., Any], *, reimplements: bool = False) -> Callable[[], None]:
    """Replaces a method of this one object by function(stock, *args, **kwargs); the returned function restores it.

    stock is the method that was there.

    It becomes a bound method with the signature of the original one, so that torch.compile can trace it. A hook of accelerate
    stays around it. If somebody else has wrapped the method since (as PEFT, accelerate and torchao do), their wrapper
    stays, and what it calls is from then on the original method.

    Args:
        reimplements: the function does not always call stock, but does its work itself. A UserError if somebody has put a
            wrapper on the method before, because it would be skipped.
    """

    def method(patch: Patch, *args: Any, **kwargs: Any) -> Any:
        return patch.function(*args, **kwargs)

    if reimplements:
        check_own(owner, name)
    place = find_method(owner, name)
    stock = getattr(owner, place)
    signature = inspect.signature(stock)
    first = inspect.Parameter("_patch", inspect.Parameter.POSITIONAL_ONLY)
    others = [one for one in signature.parameters.values() if one.name != first.name]  # wrappers copy our signature
    method.__signature__ = signature.replace(parameters=[first, *others])  # type: ignore[attr-defined]
    method.__name__ = "__call__"  # bound methods are pickled by this name, as getattr(patch, name)
    patch = Patch(functools.partial(function, stock))
    bound = MethodType(method, patch)
    undo = set_attribute(owner, place, bound)
    counts = _patched.setdefault(owner, Counter())
    if not counts.total():
        owner.__dict__.update(_REFUSALS)
    counts[name] += 1

    def take_off() -> None:
        undo()
        for moved in [key for key, value in owner.__dict__.items() if value is bound]:  # accelerate moves it when it wraps
            owner.__dict__[moved] = stock
        patch.function, patch.is_active = stock, False
        counts[name] -= 1
        if not counts.total():
            for refusal in _REFUSALS:
                owner.__dict__.pop(refusal, None)

    return take_off


def run_stock(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The replacement of a method that changes nothing."""
    return stock(*args, **kwargs)


def find_method(owner: Any, name: str) -> str:
    """The attribute of this object that holds its method: another one than `name` inside a hook of accelerate.

    (accelerate puts back what is there when its hook is removed.)
    """
    there = owner.__dict__.get(name)
    is_hooked = isinstance(there, functools.partial) and there.func.__module__ == "accelerate.hooks"
    return "_old_forward" if is_hooked else name


def check_own(owner: Any, name: str, advice: str = "take it off, apply the plan, and put it on again") -> None:
    """Raises a UserError if somebody has replaced a method of this object, other than by a hook of accelerate."""
    there = owner.__dict__.get(find_method(owner, name))
    while isinstance(there, MethodType) and isinstance(there.__self__, Patch) and not there.__self__.is_active:
        there = there.__self__.function  # what a plan left in the wrapper of somebody
    if there is not None and getattr(there, "__func__", None) is not getattr(type(owner), name):
        raise UserError(
            f"{type(owner).__name__}.{name} was replaced by {_describe(there)}, which the plan would skip; {advice}"
        )


def _describe(function: Any) -> str:
    """The name of a function by its own code: functools.wraps copies the name of what it wraps."""
    function = getattr(function, "func", function)  # of a functools.partial
    code = getattr(function, "__code__", None)
    module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return short(f"{module}.{type(function).__qualname__ if code is None else code.co_name}", 80)


def _refuse_copy() -> None:
    raise UserError("a model with a plan cannot be copied or saved whole; remove() the plan first")


def _refuse_replicas() -> None:
    raise UserError(NO_REPLICAS)


# Set on an object while one of its methods is replaced: a copy would share the replaced method with the original.
_REFUSALS: dict[str, Callable[[], None]] = {"__getstate__": _refuse_copy, "_replicate_for_data_parallel": _refuse_replicas}


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


def check_attention(attention: nn.Module) -> None:
    """Raises a UserError if somebody has replaced the forward of an attention whose work is done outside of it."""
    check_own(attention, "forward", "take it off, or wrap the whole block after the plan was applied")


def check_no_hooks(module: nn.Module) -> None:
    """Raises a UserError if a module that a plan does not call has forward hooks."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise UserError(f"a {type(module).__name__} of an attention has hooks, which the plan would skip; remove them")


def call_attention(module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `module(*args, **kwargs)` would return if the function were its forward: hooks of torch and accelerate run."""
    check_attention(module)
    if module._backward_hooks or module._backward_pre_hooks:
        raise UserError(f"{type(module).__name__} has backward hooks, which the plan would skip; remove them")
    for key, hook in list(module._forward_pre_hooks.items()):
        if key in module._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        elif (changed := hook(module, args)) is not None:
            args = changed if isinstance(changed, tuple) else (changed,)
    outer: Any = module.__dict__.get("_hf_hook")  # of accelerate
    if outer is None:
        out = function(*args, **kwargs)
    else:
        args, kwargs = outer.pre_forward(module, *args, **kwargs)
        out = outer.post_forward(module, function(*args, **kwargs))
    for key, hook in list(module._forward_hooks.items()):
        with_kwargs = key in module._forward_hooks_with_kwargs
        changed = hook(module, args, kwargs, out) if with_kwargs else hook(module, args, out)
        out = out if changed is None else changed
    return out


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

        def forward(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
