"""MCTF: tokens are fused by similarity, how little attention they get, and how small they are; in both directions.

Lee et al., "Multi-criteria Token Fusion with One-step-ahead Attention for Efficient Vision Transformers", CVPR 2024,
arXiv:2403.10030. Written from the formulas.

    score_ij = (cos(x_i, x_j) + 1) / 2 (u_i u_j)^(1/20) (v_i v_j)^(1/40)     u = 1 / attention received, v = 1 / size, each /
        its max
    A and B: alternate tokens. The r // 2 best edges join A to B, then r - r // 2 join B to the A that stayed
    mean weighted by attention x size; sizes add up; of the attention, columns add up and rows are averaged alike

Place: between attention and MLP of every block, r = 16. Later attention adds log(size), the option `sizes`. Attention is that
of the block; the released code takes it one step ahead. The second direction sees the tokens that the first has made. Prefix
tokens are never merged, but count in the alternation. Of equal scores the first wins.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.methods.tome import min_keep
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
    """Two matchings, one after the other."""
    assert view.attention is not None
    r, first = view.n - max(keep, min_keep(view.n)), view.attention.prefix % 2
    rows = torch.cat([entries.mean(1) for entries in view.attention.row_blocks()], dim=1)  # (B, P+N, P+N)
    p = view.attention.prefix
    x, received, sizes = view.tokens.float(), rows[:, :, p:].mean(1), view.sizes_or_ones()
    in_a = (torch.arange(view.n, device=x.device) % 2 == first).expand(x.shape[0], -1)
    one, in_a = _fuse(x, received, sizes, in_a, r // 2)
    assert one.sizes is not None
    columns = one.apply(rows, p)[:, :, p:].mean(1)  # (B, N), from rows that are averaged
    total = torch.zeros_like(columns[:, : one.k]).scatter_add(1, one.groups, columns)
    two, _ = _fuse(one.apply(x), total, one.sizes, ~in_a, r - r // 2)
    return replace(one.then(two), sizes=two.sizes)


def _fuse(x: Tensor, received: Tensor, sizes: Tensor, sends: Tensor, r: int) -> tuple[Reduction, Tensor]:
    """The r best edges from senders (B, N) to the others; and which output tokens are senders that stayed."""
    rare, small = 1 / received.clamp_min(TINY), 1 / sizes
    factor = (rare / rare.amax(1, keepdim=True)) ** (1 / 20) * (small / small.amax(1, keepdim=True)) ** (1 / 40)
    score = (cosine(x, x) + 1) / 2 * factor[:, :, None] * factor[:, None]  # (B, N, N)
    best, partner = score.masked_fill(sends[:, None], -1.0).max(-1)  # (B, N)
    sent = best.masked_fill(~sends, -2.0).argsort(dim=1, descending=True, stable=True)[:, :r]
    position = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    target = position.scatter(1, sent, partner.gather(1, sent))
    stays = target == position
    index = positions(stays, x.shape[1] - r)
    groups = (stays.long().cumsum(1) - 1).gather(1, target)
    merged = Reduction.merge(groups, index, received.clamp_min(TINY) * sizes)
    total = torch.zeros_like(sizes[:, : merged.k]).scatter_add(1, groups, sizes)
    return replace(merged, sizes=total), sends.gather(1, index)
