"""Changing one instance so that it can be changed back exactly."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from tokensieve.errors import UserError

_NOTHING = object()


class Patch:
    """A function in the place of a method of one object, or a hook on it.

    A copy of the object would still work on the original, so it cannot be copied or pickled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UserError("a model with a plan on it cannot be copied or saved whole; remove() the plan first")

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__({})


def replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Puts the function over the method of this one object; what is returned takes it off again."""
    before = owner.__dict__.get(name, _NOTHING)
    patch = Patch(function)
    patch.__signature__ = inspect.signature(getattr(owner, name))  # type: ignore[attr-defined]  # who asks gets the method's own
    owner.__dict__[name] = patch

    def undo() -> None:
        if before is _NOTHING:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = before

    return undo
