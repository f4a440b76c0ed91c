"""Headers: JSON tables that say what weights are, with a checksum that covers the table itself."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from tokensieve.errors import UserError

MAX_HEADER = 1 << 20  # bytes
MAX_DEPTH = 20  # tables and lists inside each other
MAX_INTEGER = 1 << 64
CHECKSUM = "sha256"  # the key of the checksum


def check_header(value: Any, source: str) -> dict[str, Any]:
    """The value of a JSON text if it is a table of plain values; a UserError if it is not, or for NaN or deep nesting."""
    if not isinstance(value, dict):
        raise UserError(f"{source}: its header is not a table")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        for item in level:
            if isinstance(item, float) and not math.isfinite(item):
                raise UserError(f"{source}: its header holds a number that is not finite")
            if isinstance(item, int) and abs(item) > MAX_INTEGER:
                raise UserError(f"{source}: its header holds an integer of {item.bit_length()} bits")
        level = [
            inner
            for item in level
            if isinstance(item, (dict, list))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return value
    raise UserError(f"{source}: its header is nested more than {MAX_DEPTH} deep")


def as_header(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A table as JSON gives it back; a UserError if JSON cannot hold it, or if it could not be read again."""
    try:
        text = json.dumps(values, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{source}: what it was trained for cannot be written as JSON: {error}") from None
    if len(text) > MAX_HEADER:
        raise UserError(f"{source}: its header has {len(text):,} characters, more than {MAX_HEADER:,}")
    return check_header(json.loads(text), source)


def checksum(header: Mapping[str, Any], content: Iterable[bytes] = ()) -> str:
    """SHA-256 over everything in the header but the checksum, and over the content that it describes."""
    others = {key: value for key, value in header.items() if key != CHECKSUM}
    total = hashlib.sha256(json.dumps(others, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
    for block in content:
        total.update(block)
    return total.hexdigest()
