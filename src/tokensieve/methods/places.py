"""Where authors put their cuts, at the same relative depth of any model, and how many tokens they leave there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokensieve.methods.registry import Place


def inside_quarters(depth: int, decoder: int) -> str:
    """Inside blocks 4, 7 and 10 of 12, between attention and MLP."""
    numbers = sorted({depth * quarter // 4 + 1 for quarter in (1, 2, 3)} & set(range(1, depth + 1)))
    return ",".join(map(str, numbers or [1])) + ".attn"


def after_quarters(depth: int, decoder: int) -> str:
    """After blocks 3, 6 and 9 of 12."""
    numbers = sorted({max(1, depth * quarter // 4) for quarter in (1, 2, 3)})
    return ",".join(map(str, numbers))


def decoder_quarters(depth: int, decoder: int) -> str:
    """Before layers 8, 16 and 24 of 32."""
    numbers = sorted({max(1, decoder * quarter // 4) for quarter in (1, 2, 3)})
    return "llm." + ",".join(map(str, numbers))


def floored_share(place: Place, options: Mapping[str, Any]) -> int:
    """int(n * share) tokens, where plans round shares up."""
    return place.keep if place.share is None else max(1, int(place.n * place.share))


def rounded_share(place: Place, options: Mapping[str, Any]) -> int:
    """round(n * share) tokens, halves to the even number, where plans round shares up."""
    return place.keep if place.share is None else max(1, round(place.n * place.share))


def powers_of_share(place: Place, options: Mapping[str, Any]) -> int:
    """A share at each of several cuts, of the tokens before the first one: int(first * share^i) behind the i-th cut."""
    return place.keep if place.share is None else max(1, int(place.first * place.share ** (place.number + 1)))
