"""ToFu: ToMe's pairs are pruned in the first half of the tower and merged in the second, with norms that do not shrink.

Kim et al., "Token Fusion: Bridging the Gap between Token Pruning and Token Merging", WACV 2024, arXiv:2312.01026. Written from
the formulas.

    ToMe's matching of keys finds r pairs
    blocks i <= L / 2 (from 0): the senders vanish
    later blocks: MLERP, the mean of a group, scaled to the largest norm of its members

Place: between attention and MLP of every block, r = 8. Means are weighted by size, and later attention adds log(size). At most
half of the patches go at one block. Of equal cosines the first wins.
"""

from __future__ import annotations

import torch

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.methods.tome import match, min_keep
from tokensieve.scoring import full_precision

TINY = torch.finfo(torch.float32).tiny


@method(
    summary="ToMe's pairs, pruned in early blocks and merged with their norm in later ones",
    paper='Kim et al., "Token Fusion: Bridging the Gap between Token Pruning and Token Merging", WACV, 2024, arXiv:2312.01026',
    needs=("attention",),
    selects=False,
    budget=lambda options: "-8",
    where="*.attn",
    min_keep=min_keep,
    sums=True,
)
@full_precision
def tofu(view: View, keep: int) -> Reduction:
    """One matching; its senders are dropped or merged, by the depth of the block."""
    assert view.attention is not None
    groups, index = match(view.attention.keys(), view.attention.prefix, view.n - max(keep, min_keep(view.n)))
    if view.layer - 1 <= view.depth // 2:
        return Reduction(index, view.n)
    merged = Reduction.merge(groups, index, view.sizes_or_ones())
    assert merged.shares is not None
    norms = view.tokens.float().norm(dim=-1)  # (B, N)
    largest = torch.zeros_like(norms[:, : merged.k]).scatter_reduce(1, groups, norms, "amax")  # (B, K)
    means = merged.apply(view.tokens.float()).norm(dim=-1)
    merged.shares = merged.shares * (largest / means.clamp_min(TINY)).gather(1, groups)
    return merged
