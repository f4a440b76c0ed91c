"""The bipartite matching of ToMe, with which several methods find pairs of similar tokens.

    A = tokens 0, 2, 4, ... and B = tokens 1, 3, 5, ...       prefix tokens are counted, but never matched
    each token of A finds its most similar token of B; the r most similar ones join theirs

A token of A joins at most once, so at least half of the tokens are left. Of equal similarities the first wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.scoring import cosine


def min_keep(n: int) -> int:
    """The fewest of n tokens that one matching leaves."""
    return n - n // 2


def match(metric: Tensor, prefix: int, r: int) -> tuple[Tensor, Tensor]:
    """One bipartite matching of tokens by a metric (B, N, d): groups (B, N), and what represents them (B, K).

    prefix: tokens before the patches, which count in the alternation. The r most similar tokens of A join their partners in B.
    """
    n, first = metric.shape[1], prefix % 2  # A's first patch
    similarity, partner = cosine(metric[:, first::2], metric[:, 1 - first :: 2]).max(-1)  # (B, |A|)
    order = similarity.sort(dim=-1, descending=True, stable=True).indices
    merged, unmerged = order[:, :r], order[:, r:]
    if prefix:
        unmerged = unmerged.sort(-1).values
    position = torch.arange(n, device=metric.device)
    b = position[1 - first :: 2].expand(metric.shape[0], -1)  # (B, |B|)
    index = torch.cat([2 * unmerged + first, b], dim=1)  # (B, K)
    groups = torch.empty_like(position).expand(metric.shape[0], -1)
    groups = groups.scatter(1, index, position[: index.shape[1]].expand_as(index))
    return groups.scatter(1, 2 * merged + first, unmerged.shape[1] + partner.gather(1, merged)), index
