"""Anchors, importance and diversity.

    A_coarse = attention of CLS to the patches (View.coarse)        the k largest are anchors
    I_i      = mean over anchors j of Attn(x_i, x_j)                importance
    D_i      = 1 - max over anchors j of cos(x_i, x_j)              diversity
    S_i      = alpha * I_i + (1 - alpha) * D_i                      the best non-anchors are kept too

I is about 1/N and D about 1, so by default both are scaled to [0, 1] over the patches of each image first
(normalize=minmax); normalize=none is the literal formula, in which alpha=0.5 means diversity almost alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.registry import method
from tokensieve.scoring import Attention, cosine, minmax, top


def check_options(options: Mapping[str, Any]) -> None:
    """k at least 1, m at least 0, alpha within [0, 1]."""
    if options["k"] < 1:
        raise UserError(f"anchor: k={options['k']}, but at least one anchor is needed; for example k=10")
    if options["m"] < 0:
        raise UserError(f"anchor: m={options['m']} is below 0; m=0 keeps the anchors alone")
    if not 0 <= options["alpha"] <= 1:
        raise UserError(f"anchor: alpha={options['alpha']} is outside [0, 1]; 1 is importance only, 0 diversity only")


def importance(attention: Attention, anchors: Tensor) -> Tensor:
    """I: mean attention of each patch to the anchors, (B, k) -> (B, N)."""
    return attention.columns(anchors).mean(-1)


def diversity(tokens: Tensor, anchors: Tensor) -> Tensor:
    """D: one minus the cosine to the most similar anchor, (B, N, D), (B, k) -> (B, N)."""
    return 1 - cosine(tokens, tokens.gather(1, anchors[..., None].expand(-1, -1, tokens.shape[2]))).amax(-1)


def score(attention: Attention, tokens: Tensor, anchors: Tensor, alpha: float, normalize: str) -> Tensor:
    """S of every patch, the anchors' included, (B, N)."""
    return combine(importance(attention, anchors), diversity(tokens, anchors), alpha, normalize)


def combine(importance: Tensor, diversity: Tensor, alpha: float, normalize: str) -> Tensor:
    """S from I and D of the patches, (B, N)."""
    parts = importance, diversity
    i, d = map(minmax, parts) if normalize == "minmax" else parts
    return alpha * i + (1 - alpha) * d


def select(scores: Tensor, anchors: Tensor, keep: int) -> Reduction:
    """The anchors, whatever their S, and the best of the other patches, `keep` in all."""
    ranking = scores.scatter(1, anchors, torch.inf)
    return Reduction.keep(top(ranking, keep), scores.shape[1], scores=scores, anchors=anchors)


@method(
    summary="anchors by CLS attention, then the patches that matter to them and differ from them",
    needs=("attention",),
    check=check_options,
    budget=lambda options: options["k"] + options["m"],
)
def anchor(
    view: View,
    keep: int,
    *,
    k: int = 10,
    m: int = 50,
    alpha: float = 0.5,
    normalize: Literal["minmax", "none"] = "minmax",
) -> Reduction:
    """k anchors and the best of the other patches, `keep` in all (k + m where the plan has no budget)."""
    assert view.attention is not None
    anchors = top(view.coarse(), min(k, keep))
    return select(score(view.attention, view.tokens, anchors, alpha, normalize), anchors, keep)
