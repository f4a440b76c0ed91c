"""ToFu: ToMe's pairs are pruned in the first half of the tower and merged in the second, with norms that do not shrink.

Kim et al., "Token Fusion: Bridging the Gap between Token Pruning and Token Merging", WACV 2024, arXiv:2312.01026. Written from
the formulas; no licence file of the released code is known to us.

    ToMe's matching of keys finds r pairs
    blocks i <= L / 2 (from 0): the senders vanish
    later blocks: MLERP, the plain mean of a group x the largest norm of its members / the norm of the receiver before the merge

The last divisor is that of the released code, with which an output may be longer or shorter than its members. In the paper it
is the norm of the mean, so that the output has the largest norm: `rescale=mean`. Receivers that nothing joins stay as they are.
Place: between attention and MLP of every block, r = 8. Later attention adds log(size). At most half of the patches go at one
block. Of equal cosines the first wins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from tokensieve.core import Reduction, View
from tokensieve.methods.matching import match, min_keep
from tokensieve.methods.registry import method
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
def tofu(view: View, keep: int, *, rescale: Literal["receiver", "mean"] = "receiver") -> Reduction:
    """One matching; its senders are dropped or merged, by the depth of the block."""
    assert view.attention is not None
    groups, index = match(view.attention.keys(), view.attention.prefix, view.n - max(keep, min_keep(view.n)))
    if view.layer - 1 <= view.depth // 2:
        return Reduction(index, view.n)
    sizes, norms = view.sizes_or_ones(), view.tokens.float().norm(dim=-1)  # (B, N) each
    zeros = torch.zeros_like(norms[:, : index.shape[1]])  # (B, K)
    merged = replace(Reduction.merge(groups, index, torch.ones_like(sizes)), sizes=zeros.scatter_add(1, groups, sizes))
    assert merged.shares is not None
    largest = zeros.scatter_reduce(1, groups, norms, "amax")
    divisor = norms.gather(1, index) if rescale == "receiver" else merged.apply(view.tokens.float()).norm(dim=-1)
    return replace(merged, shares=merged.shares * (largest / divisor.clamp_min(TINY)).gather(1, groups))
