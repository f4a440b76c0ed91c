"""vid-TLDR: tokens with spread attention are background; they are merged, and count little where they go.

Choi et al., "vid-TLDR: Training Free Token merging for Light-weight Video Transformer", CVPR 2024, arXiv:2403.13347. Written
from the formulas; no licence file of the released code is known to us.

    s_i = sum_j p_ij log p_ij of the attention of token i, mean over heads      sharp attention: large
    s <- min-max over the tokens; below their mean m: 0; else (s - m) / (1 - m)
    the r most similar pairs of ToMe's matching, on the tokens themselves, are merged
    a token that is merged into another enters its mean and its size with the weight s_i

Place: in the first blocks of a video transformer, between attention and MLP; here in every block, as `tome`, with the same
budget, 8 tokens fewer in each. At most half of the tokens go at a time. Later attention adds log(size), the option `sizes`. Of
equal cosines the first wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.matching import match, min_keep
from tokensieve.methods.registry import method
from tokensieve.scoring import Attention, full_precision, minmax

TINY = torch.finfo(torch.float32).tiny


@method(
    summary="ToMe's pairs, in which background tokens, whose attention is spread, count little",
    paper='Choi et al., "vid-TLDR: Training Free Token merging for Video Transformers", CVPR, 2024, arXiv:2403.13347',
    needs=("attention",),
    selects=False,
    budget=lambda options: "-8",
    where="*.attn",
    min_keep=min_keep,
)
@full_precision
def vidtldr(view: View, keep: int) -> Reduction:
    """One matching, in which senders have the weight of their saliency."""
    assert view.attention is not None
    saliency = sharpness(view.attention)  # (B, N)
    groups, index = match(view.tokens.float(), view.attention.prefix, view.n - max(keep, min_keep(view.n)))
    sends = torch.ones_like(saliency).scatter(1, index, 0.0)
    weights = view.sizes_or_ones() * torch.where(sends > 0, saliency, 1.0)
    return Reduction.merge(groups, index, weights, saliency)


def sharpness(attention: Attention) -> Tensor:
    """How sharp the attention of each patch is, 0 for those below the mean: (B, N)."""
    rows = []
    for entries in attention.row_blocks():  # (B, H, rows, P+N)
        p = entries.mean(1)
        rows.append((p * p.clamp_min(TINY).log()).sum(-1))
    s = minmax(torch.cat(rows, dim=1)[:, attention.prefix :])
    mean = s.mean(1, keepdim=True)
    return torch.where(s < mean, 0.0, (s - mean) / (1 - mean).clamp_min(TINY))
