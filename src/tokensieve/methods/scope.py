"""SCOPE: one token after the other, by what it adds to the coverage of all tokens, times its saliency.

"SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodal LLMs", NeurIPS 2025, arXiv:2510.24214. Written from
the formulas; no licence file of the released code is known to us.

    choose argmax_j a_j^alpha sum_i max(0, cos(x_i, x_j) - best_i),  best_i = the largest cosine to a chosen token, 0 at first
    a = CLS attention, heads summed;  alpha = 1

Place: at the tower's output, on the states of the last block but one. Kept tokens are in raster order. Of equal gains the
first.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.attention_rows import global_attention
from tokensieve.methods.greedy_cover import greedy_cover
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, gather_rows


@method(
    summary="one token after the other, by coverage of all tokens times attention",
    paper='"SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodal LLMs", NeurIPS, 2025, arXiv:2510.24214',
    needs=("attention",),
    budget=lambda options: "64",
    where="out",
)
@full_precision
def scope(view: View, keep: int, *, alpha: float = 1.0) -> Reduction:
    """Greedy choice by coverage and saliency."""
    assert view.attention is not None
    attention = global_attention(view) * view.attention.k.shape[1]  # heads summed
    unit = F.normalize(view.tokens.float(), dim=-1)  # (B, N, D)

    def columns(some: Tensor) -> Tensor:
        return (gather_rows(unit, some) @ unit.transpose(1, 2)).transpose(1, 2)  # of one token faster than unit @ token

    index, _ = greedy_cover(columns, attention**alpha, keep)
    return Reduction.keep(index, view.n, scores=attention)
