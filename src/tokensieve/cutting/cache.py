"""The key/value cache of a decoder with a plan: which entries each layer holds, recorded on the cache itself."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stage:
    """The tokens of the layers between two cuts. Without `alive` and `bias` it is two numbers, which cost a step nothing."""

    shape: tuple[int, int]  # B, T
    alive: Tensor | None = None  # (B, T), False is padding, which is hidden; None: all are True
    bias: Tensor | None = None  # (B, T), log of sizes and of soft masks; None: all are 0
    at: Tensor | None = None  # (B, T), indices in the sequence with all its tokens, in a decoder with windows; else None

    def first(self, count: int) -> Stage:
        """The first `count` tokens."""
        if count == self.shape[1]:
            return self
        rows = self.shape[0]
        return Stage((rows, count), *(None if each is None else each[:, :count] for each in (self.alive, self.bias, self.at)))

    def last(self, count: int) -> Stage:
        """The last `count` tokens."""
        if count == self.shape[1]:
            return self
        rows = self.shape[0]
        return Stage((rows, count), *(None if each is None else each[:, -count:] for each in (self.alive, self.bias, self.at)))

    def to(self, device: torch.device) -> Stage:
        """The same on a device."""
        return Stage(self.shape, *(None if each is None else each.to(device) for each in (self.alive, self.bias, self.at)))

    def then(self, new: Stage) -> Stage:
        """These tokens followed by the new ones."""
        shape = (self.shape[0], self.shape[1] + new.shape[1])
        at = None if self.at is None or new.at is None else torch.cat([self.at, new.at], dim=1)
        return Stage(shape, _join(self, new, "alive", True), _join(self, new, "bias", 0.0), at)


def _join(before: Stage, after: Stage, name: str, default: float) -> Tensor | None:
    """A tensor of two stages, one after the other; None if neither has it."""
    found: list[Tensor | None] = [getattr(stage, name) for stage in (before, after)]
    known = next((tensor for tensor in found if tensor is not None), None)
    if known is None:
        return None
    both = zip(found, (before, after), strict=True)
    return torch.cat([known.new_full(stage.shape, default) if tensor is None else tensor for tensor, stage in both], dim=1)


@dataclass
class CacheRecord:
    """The record of a plan on a cache."""

    plan: str
    n_tokens_fed: int  # tokens of each prompt so far, with padding and dropped tokens
    stages: dict[int, Stage] = field(default_factory=dict)  # by the first layer of each stage


class PrunedCache:
    """A cache whose layers hold fewer tokens than were processed. Its overall length is the number of processed tokens."""

    tokensieve_record: CacheRecord

    def get_seq_length(self, layer_idx: int = 0) -> int:
        length: int = super().get_seq_length(layer_idx)  # type: ignore[misc]
        return self.tokensieve_record.n_tokens_fed if layer_idx == 0 else length

    def crop(self, *args: Any, **kwargs: Any) -> None:
        before = self.tokensieve_record.n_tokens_fed - super().get_seq_length(0)  # type: ignore[misc]
        super().crop(*args, **kwargs)  # type: ignore[misc]
        self.tokensieve_record.n_tokens_fed = before + super().get_seq_length(0)  # type: ignore[misc]


@functools.cache
def pruned_cache_class(kind: Any) -> Any:
    """The class of a pruned cache of this kind."""
    return type(f"Pruned{kind.__name__}", (PrunedCache, kind), {})


def cache_record(cache: Any) -> CacheRecord | None:
    """The record of the plan that filled a cache; None: no plan did."""
    return cache.tokensieve_record if isinstance(cache, PrunedCache) else None


def cached_length(cache: Any, layer: int) -> int:
    """The number of tokens that a layer put into the cache; a layer with a window keeps the last of them only."""
    return int(cache.layers[layer].get_seq_length()) if cache is not None and len(cache.layers) > layer else 0


def attended_length(cache: Any, layer: int, new: int) -> int:
    """The number of tokens that a layer attends to, with `new` ones."""
    return int(cache.layers[layer].get_mask_sizes(new)[0]) if cache is not None and len(cache.layers) > layer else new
