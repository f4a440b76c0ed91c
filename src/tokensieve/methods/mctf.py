"""MCTF: tokens are fused by similarity, how little attention they get, and how small they are; in both directions.

Lee et al., "Multi-criteria Token Fusion with One-step-ahead Attention for Efficient Vision Transformers", CVPR 2024,
arXiv:2403.10030. Written from the formulas; no licence file of the released code is known to us.

    score_ij = (cos(x_i, x_j) + 1) / 2 (u_i u_j)^(1/20) (v_i v_j)^(1/40)     u = 1 / attention received, v = 1 / size, each /
        its max
    A and B: alternate tokens. The r // 2 best edges join A to B, then r - r // 2 join B to the A that stayed
    mean weighted by attention x size; sizes add up

Place: between attention and MLP of every block, r = 16. Later attention adds log(size), the option `sizes`. Attention is that
of the block; the released code takes it one step ahead. Both directions read one matrix of scores, computed before anything is
fused. So a token of A that joined one of B goes along where that one goes, and an output is one mean of all its members, by the
attention and sizes that they came with. Prefix tokens are never merged, but count in the alternation. Of equal scores the first
wins.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.matching import min_keep
from tokensieve.methods.registry import method
from tokensieve.scoring import cosine, full_precision, positions

TINY = torch.finfo(torch.float32).tiny


@method(
    summary="tokens fused by similarity, attention and size, in both directions",
    paper='Lee et al., "Multi-criteria Token Fusion with One-step-ahead Attention", CVPR, 2024, arXiv:2403.10030',
    needs=("attention",),
    selects=False,
    norm=0.0,
    budget=lambda options: "-16",
    where="*.attn",
    min_keep=min_keep,
)
@full_precision
def mctf(view: View, keep: int) -> Reduction:
    """Two matchings by one matrix of scores, fused at once."""
    assert view.attention is not None
    r, first = view.n - max(keep, min_keep(view.n)), view.attention.prefix % 2
    received, sizes = view.attention.received().clamp_min(TINY), view.sizes_or_ones()
    score = _scores(view.tokens.float(), received, sizes)
    position = torch.arange(view.n, device=score.device).expand(score.shape[0], -1)
    in_a = position % 2 == first
    one = _parents(score, in_a, ~in_a, r // 2)
    two = _parents(score, ~in_a, in_a & (one == position), r - r // 2)
    parent = two.gather(1, one)  # (B, N); A -> B -> A
    stays = parent == position
    index = positions(stays, view.n - r)
    groups = (stays.long().cumsum(1) - 1).gather(1, parent)
    merged = Reduction.merge(groups, index, received * sizes)
    return replace(merged, sizes=torch.zeros_like(sizes[:, : merged.k]).scatter_add(1, groups, sizes))


def _scores(x: Tensor, received: Tensor, sizes: Tensor) -> Tensor:
    """How well two tokens go together, (B, N, N): alike, little attended to, and small."""
    rare, small = 1 / received, 1 / sizes
    factor = (rare / rare.amax(1, keepdim=True)) ** (1 / 20) * (small / small.amax(1, keepdim=True)) ** (1 / 40)
    return (cosine(x, x) + 1) / 2 * factor[:, :, None] * factor[:, None]


def _parents(score: Tensor, sends: Tensor, receives: Tensor, r: int) -> Tensor:
    """The token that each token joins, (B, N): of the r best edges from senders to receivers (B, N) their ends, else itself."""
    best, partner = score.masked_fill(~receives[:, None], -1.0).max(-1)  # (B, N)
    sent = best.masked_fill(~sends, -2.0).argsort(dim=1, descending=True, stable=True)[:, :r]
    position = torch.arange(score.shape[1], device=score.device).expand(score.shape[0], -1)
    return position.scatter(1, sent, partner.gather(1, sent))
