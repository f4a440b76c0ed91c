"""HiPrune: anchors by an object layer in the middle of the tower, their neighbours, and the rest by a deep layer.

"HiPrune: Training-Free Visual Token Pruning via Hierarchical Attention in Vision-Language Models", AAAI 2026, arXiv:2508.00553.
Written from the formulas; no licence file of the released code is known to us.

    a = attention received, mean over heads and over all rows (not the CLS row)
    anchors: the round(alpha T / 5) largest a of the object layer (9 of 24, from 1); alpha = 0.1
    buffers: the neighbours of anchors on the left, right, above and below, clamped to the range
    registers: the largest a of the layer before the cut fill up to exactly T

Place: at the tower's output, which is behind the last layer but one. T counts patches. Without a complete grid its width is
taken as the root of the number of tokens.
"""

from __future__ import annotations

import math

import torch

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, top


def object_layer(depth: int) -> tuple[int, ...]:
    """Layer 9 of 24, or at the same depth of another tower. (A LLaVA runs 23 of 24 blocks.)"""
    return (max(1, round(9 * depth / 24)),)


@method(
    summary="anchors by a middle layer, their neighbours, and the rest by a deep layer",
    paper='"HiPrune: Training-Free Visual Token Pruning via Hierarchical Attention", AAAI, 2026, arXiv:2508.00553',
    needs=("attention",),
    budget=lambda options: "192",
    where="out",
    layers=object_layer,
)
@full_precision
def hiprune(view: View, keep: int, *, alpha: float = 0.1) -> Reduction:
    """Anchors, buffers and registers, `keep` in all."""
    assert view.attention is not None
    middle = view.earlier[object_layer(view.depth)[0]] if len(view.earlier) > 1 else next(iter(view.earlier.values()))
    count, deep = min(round(alpha * keep / 5), keep // 5), view.attention.received()
    if not count:
        return Reduction.keep(top(deep, keep), view.n, scores=deep)
    anchors = top(middle.received(), count)  # (B, A)
    width = view.grid[-1] if view.grid is not None else math.isqrt(view.n)
    steps = torch.tensor([0, -1, 1, -width, width], device=anchors.device)
    near = (anchors[..., None] + steps).clamp(0, view.n - 1).flatten(1)  # (B, 5 A)
    ranking = deep.scatter(1, near, torch.inf)
    return Reduction.keep(top(ranking, keep), view.n, scores=deep, anchors=anchors)
