"""Tokens that were not chosen join the most similar one that was."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokensieve.core import Reduction
from tokensieve.scoring import gather_rows, most_similar


def own_groups(groups: Tensor, index: Tensor, first: int = 0) -> Tensor:
    """Groups (B, N) in which each token of index (B, K) is in the group of its number, counted from `first`."""
    numbers = torch.arange(first, first + index.shape[1], device=index.device)
    return groups.scatter(1, index, numbers.expand_as(index))


def join_most_similar(tokens: Tensor, index: Tensor) -> Tensor:
    """For each token (B, N, D) the number of its most similar chosen token, index (B, K): (B, N). A chosen one is its own."""
    return own_groups(most_similar(tokens, gather_rows(tokens, index)), index)


def join_chosen(tokens: Tensor, index: Tensor, scores: Tensor | None = None) -> Reduction:
    """Each token (B, N, D) that is not in index (B, K) joins the chosen one with the highest cosine; plain means, no sizes."""
    groups = join_most_similar(tokens, index)
    ones = torch.ones(tokens.shape[:2], device=tokens.device)
    return replace(Reduction.merge(groups, index, ones, scores=scores), sizes=None)


def with_mean_of_rest(index: Tensor, weights: Tensor, scores: Tensor) -> Reduction:
    """The tokens of index (B, K), unchanged, and one more: the sum of the others by weights (B, N), which add up to 1.

    The others are represented by the one with the highest score. index must leave some token out.
    """
    k = index.shape[1]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, True)
    groups = own_groups(torch.full_like(scores, k, dtype=torch.long), index)
    first = scores.masked_fill(chosen, -torch.inf).argmax(1, keepdim=True)
    shares = torch.where(chosen, 1.0, weights)
    return Reduction(torch.cat([index, first], dim=1), scores.shape[1], scores=scores, assigned=groups, shares=shares)
