"""Random damage to JSON values."""

from __future__ import annotations

import json
import random
from typing import Any

JUNK = (
    *(None, True, 0, -1, 3.5, 1e308, 10**9, 10**30, float("nan"), float("inf")),
    *("", "x", "128", "\x1b[31m", "x" * 5000, [], {}),
)


def change_json(rng: random.Random, value: Any) -> Any:
    """The value with something in it replaced by junk."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        kind = rng.randrange(4)
        if kind == 0:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, rng.choice(("x", "", "\0", key)) if kind == 1 else key: change_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], change_json(rng, value[place]), *value[place + 1 :]]
    if rng.random() < 0.05:
        return [value] * rng.choice((2, 1000, 100_000))
    if rng.random() < 0.03:
        return json.loads("[" * 900 + "]" * 900)
    return rng.choice(JUNK)
