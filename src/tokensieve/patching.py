"""Changing one instance so that it can be changed back exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NOTHING = object()


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Puts value over the attribute of this one object; what is returned takes it off again."""
    before = owner.__dict__.get(name, _NOTHING)
    owner.__dict__[name] = value

    def undo() -> None:
        if before is _NOTHING:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = before

    return undo
