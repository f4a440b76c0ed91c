"""Trained modules that belong to the cuts they were trained for: one for each, which may leave a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError, describe_value
from tokensieve.methods.settings import MAX_ENTRIES, check_count

ONE_CUT: Mapping[str, int] = MappingProxyType({"4": 8})


class CutModules(nn.Module):
    """A module for each cut, by its position. cuts: how many tokens each leaves."""

    def __init__(self, width: int, cuts: Mapping[str, int], make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        check_count("width", width)
        if (
            not isinstance(cuts, Mapping)
            or not 0 < len(cuts) <= MAX_ENTRIES
            or not all(isinstance(place, str) for place in cuts)
        ):
            raise UserError(
                f'cuts are positions and how many tokens they leave, such as {{"4": 32}}, not {describe_value(cuts)}'
            )
        for place, keep in cuts.items():
            check_count(f"cuts: {place}", keep)
        self.settings: dict[str, Any] = {"width": width, "cuts": dict(cuts)}  # what builds it again
        self.at = nn.ModuleDict({place.replace(".", "_"): make(width, keep) for place, keep in cuts.items()})

    def places(self) -> list[str]:
        return [*self.settings["cuts"]]

    def forward(self, view: View) -> Any:
        return self.at[view.place.replace(".", "_")](view.tokens.float())


class FixedCuts(CutModules):
    """Modules that leave a number of tokens that is part of their weights."""

    def budget(self, place: str) -> int:
        """The number of tokens that the weights leave."""
        cuts: Mapping[str, int] = self.settings["cuts"]
        return cuts.get(place, next(iter(cuts.values())))

    def retraining_for(self, keep: int) -> str:
        return f"train them with a plan that leaves {keep} tokens there"


def mixture(view: View, weight: Tensor, finish: Callable[[Tensor], Tensor] | None = None) -> Reduction:
    """Outputs that are weighted sums of all tokens, weight (B, K, N). The token with the largest weight represents each."""
    return Reduction(index=weight.detach().argmax(-1), n=view.n, weight=weight, finish=finish)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def spread(x: Tensor, eps: float) -> Tensor:
    """The standard deviation of each token over its channels, as LayerNorm takes it: (B, N, D) -> (B, N)."""
    return torch.sqrt(x.var(-1, unbiased=False) + eps)
