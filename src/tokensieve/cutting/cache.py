"""TODO docstring."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Stage:
    """What the layers between two cuts have seen, by the cache."""

    alive: Tensor  # (B, T): False is padding, which nobody looks at
    bias: Tensor | None = None  # (B, T), log of sizes and of soft masks

    def first(self, count: int) -> Stage:
        """So many tokens of these."""
        return Stage(self.alive[:, :count], None if self.bias is None else self.bias[:, :count])

    def then(self, new: Stage) -> Stage:
        """What was there, and what came."""
        bias = None
        if self.bias is not None or new.bias is not None:
            none = torch.zeros(1, device=new.alive.device)
            both = [none.expand(part.alive.shape) if part.bias is None else part.bias for part in (self, new)]
            bias = torch.cat(both, dim=1)
        return Stage(torch.cat([self.alive, new.alive], dim=1), bias)


@dataclass
class CacheRecord:
    """What a plan has done to a cache."""

    plan: str
    seen: int  # tokens that were fed, of each prompt, padding included
    stages: dict[int, Stage] = field(default_factory=dict)  # by the layer with which each begins


class PrunedCache:
    """A cache whose layers hold fewer tokens than were fed; asked for its length in general, it tells what was fed."""

    trace: CacheRecord

    def get_seq_length(self, layer_idx: int = 0) -> int:
        length: int = super().get_seq_length(layer_idx)  # type: ignore[misc]
        return self.trace.seen if layer_idx == 0 else length

    def crop(self, *args: Any, **kwargs: Any) -> None:
        before = self.trace.seen - super().get_seq_length(0)  # type: ignore[misc]
        super().crop(*args, **kwargs)  # type: ignore[misc]
        self.trace.seen = before + super().get_seq_length(0)  # type: ignore[misc]


@functools.cache
def pruned_cache_class(kind: Any) -> Any:
    """The class of caches of a kind that a plan has been at."""
    return type(f"Sieved{kind.__name__}", (PrunedCache, kind), {})


def cache_record(cache: Any) -> CacheRecord | None:
    """What plans did to a cache; None: nothing."""
    return cache.trace if isinstance(cache, PrunedCache) else None


def cached_length(cache: Any, layer: int) -> int:
    """Tokens in the cache of a layer."""
    return int(cache.layers[layer].get_seq_length()) if cache is not None and len(cache.layers) > layer else 0
