"""Checks of the settings that build trained modules. They come from programs and from the headers of files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokensieve.errors import UserError, describe_value

MAX_COUNT = 2**31 - 1
MAX_NUMBER = 1e30
MAX_ENTRIES = 1000  # of a list


def check_count(name: str, value: Any, least: int = 1, most: int = MAX_COUNT) -> None:
    """A UserError unless the value is a whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        up_to = "" if most == MAX_COUNT else f" and at most {most}"
        raise UserError(f"{name} is a whole number of at least {least}{up_to}, not {describe_value(value)}")


def check_number(name: str, value: Any) -> None:
    """A UserError unless the value is a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= MAX_NUMBER:
        raise UserError(f"{name} is a number, not {describe_value(value)}")


def check_positive(name: str, value: Any) -> None:
    """A UserError unless the value is a finite number above 0."""
    check_number(name, value)
    if value <= 0:
        raise UserError(f"{name} is a number above 0, not {describe_value(value)}")


def check_entries(name: str, values: Any, kind: type) -> Sequence[Any]:
    """The values if they are a list of one kind, of which each is there once at most; otherwise a UserError."""
    is_list = isinstance(values, (list, tuple)) and len(values) <= MAX_ENTRIES and all(type(value) is kind for value in values)
    if not is_list or len(set(values)) < len(values):
        raise UserError(f"{name} is a list of different values of type {kind.__name__}, not {describe_value(values)}")
    return tuple(values)
