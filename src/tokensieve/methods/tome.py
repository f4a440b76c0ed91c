"""ToMe: in every block, merge the r most similar pairs of tokens, found by one bipartite matching of their keys.

Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023, arXiv:2210.09461. Written from the formulas; the released code is
CC-BY-NC 4.0.

    m = mean over heads of the keys of the block's attention                   prefix tokens are counted here, never merged
    A = tokens 0, 2, 4, ... and B = tokens 1, 3, 5, ... of the sequence         so with a CLS token alone the first patch is in B
    each token of A finds its most similar token of B, by the cosine of m
    the r tokens of A with the highest cosine are merged into theirs            size-weighted mean; sizes add up

Place and budget of the paper: between attention and MLP of every block, r = 8 (`tome` = `tome@*.attn:-8`). A token of A is merged
at most once, so at most half of the patches go at one place: r <- min(r, floor(N / 2)), N without prefix tokens. Proportional
attention (log size on later keys) is the option `sizes`. A schedule is one step for each block: `tome@1.attn:-16 + tome@2.attn:-12`.

Differences: outputs stay in raster order (the released code moves unmerged tokens of A to the front); of equal cosines the first
wins; a key of length 0 has the cosine 0. Keys are those that the attention multiplies, after their norm and rotation where a
tower has them.
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
    keys, first = view.attention.keys(), view.attention.prefix % 2  # (B, N, d); the place of A's first patch
    similarity, partner = cosine(keys[:, first::2], keys[:, 1 - first :: 2]).max(-1)  # (B, |A|)
    order = similarity.sort(dim=-1, descending=True, stable=True).indices
    merged, unmerged = order[:, :r], order[:, r:]
    if view.attention.prefix:
        unmerged = unmerged.sort(-1).values
    place = torch.arange(view.n, device=keys.device)
    b = place[1 - first :: 2].expand(len(keys), -1)  # (B, |B|)
    index = torch.cat([2 * unmerged + first, b], dim=1)  # (B, K)
    groups = torch.empty_like(place).expand(len(keys), -1).scatter(1, index, place[: index.shape[1]].expand_as(index))
    groups = groups.scatter(1, 2 * merged + first, unmerged.shape[1] + partner.gather(1, merged))
    return Reduction.merge(groups, index, view.sizes_or_ones())
