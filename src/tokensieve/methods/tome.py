"""ToMe: in every block, merge the r most similar pairs of tokens, found by one bipartite matching of their keys.

Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023, arXiv:2210.09461. Written from the formulas; the released code is
CC-BY-NC 4.0.

    m = mean over heads of the keys of the block's attention           prefix tokens are counted, but never merged
    A = tokens 0, 2, 4, ... and B = tokens 1, 3, 5, ...                so with CLS alone before them, the first patch is in B
    each token of A finds its most similar token of B                  cosine of m
    the r tokens of A with the highest cosine are merged into theirs   size-weighted mean; sizes add up

Place and budget of the paper: between attention and MLP of every block, r = 8 (`tome` is `tome@*.attn:-8`). A schedule is one
step for each block: `tome@1.attn:-16 + tome@2.attn:-12`. A token of A is merged at most once, so at most half of the patches go
at one position: r <- min(r, floor(N / 2)), N without prefix tokens.

The output order is that of the released code, because the next split depends on it: unmerged tokens of A, then B. The tokens of
A keep their order if there are prefix tokens; else they are in the order of falling similarity.

Proportional attention (log size on later keys) is the option `sizes`. With `sizes=no` later means do not count sizes either;
the released code still weights means by size when proportional attention is off. Other differences: of equal cosines the first
wins, a key of length 0 has the cosine 0, and all prefix tokens are protected, not only CLS and distillation. Keys are those
that the attention multiplies: after their norm and rotation, where a tower has them.
"""

from __future__ import annotations

import torch

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.scoring import cosine


def min_keep(n: int) -> int:
    """The fewest of n tokens that one matching leaves."""
    return n - n // 2


@method(
    summary="the most similar pairs of tokens merged, in every block, by a bipartite matching of keys",
    paper='Bolya et al., "Token Merging: Your ViT But Faster", ICLR, 2023, arXiv:2210.09461',
    needs=("attention",),
    selects=False,
    budget=lambda options: "-8",
    norm=0.0,
    where="*.attn",
    min_keep=min_keep,
)
def tome(view: View, keep: int) -> Reduction:
    """One matching; never fewer than half of the tokens are kept."""
    assert view.attention is not None
    r = view.n - max(keep, min_keep(view.n))
    keys, first = view.attention.keys(), view.attention.prefix % 2  # (B, N, d); A's first patch
    similarity, partner = cosine(keys[:, first::2], keys[:, 1 - first :: 2]).max(-1)  # (B, |A|)
    order = similarity.sort(dim=-1, descending=True, stable=True).indices
    merged, unmerged = order[:, :r], order[:, r:]
    if view.attention.prefix:
        unmerged = unmerged.sort(-1).values
    position = torch.arange(view.n, device=keys.device)
    b = position[1 - first :: 2].expand(keys.shape[0], -1)  # (B, |B|)
    index = torch.cat([2 * unmerged + first, b], dim=1)  # (B, K)
    groups = torch.empty_like(position).expand(keys.shape[0], -1).scatter(1, index, position[: index.shape[1]].expand_as(index))
    groups = groups.scatter(1, 2 * merged + first, unmerged.shape[1] + partner.gather(1, merged))
    return Reduction.merge(groups, index, view.sizes_or_ones())
