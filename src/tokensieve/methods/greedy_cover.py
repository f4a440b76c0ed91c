"""Greedy cover (facility location): add the token that most increases the sum over rows of the best benefit so far.

    gain_j = w_j sum_i max(0, S_ij - best_i),   j* = argmax_j gain_j,   best_i = max(best_i, S_ij*),   best = 0 at first

Gains only shrink as `best` grows, so an old gain is an upper bound. Each step recomputes the gains of the few tokens with the
highest bounds, until none of the others can be better. The result is that of the full search, but S is made a few columns at a
time and never stored. All images of a batch go step by step together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokensieve.scoring import full_precision

AT_ONCE = 16  # columns whose gains are recomputed in one round
FIRST = 128  # columns of the first gains in memory at a time
SLACK = 1e-5  # relative: rounding may raise a gain, by less than this


@full_precision
def greedy_cover(columns: Callable[[Tensor], Tensor], weights: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Chosen tokens.

    Args:
        columns: of tokens (B, c) their benefits S (B, rows, c), float32.
        weights: (B, N), the factor of each token's gain, at least 0.
        k: how many tokens.

    Returns:
        index: (B, K), in the order in which they are chosen. Of equal gains the first token.
        gains: (B, N), the gain of each token alone.
    """
    batch, n = weights.shape
    every = torch.arange(n, device=weights.device).expand(batch, -1)
    bounds = torch.zeros_like(weights)  # (B, N), -inf: chosen
    best = torch.zeros_like(columns(every[:, :1]))  # (B, rows, 1)

    def gains(some: Tensor) -> Tensor:
        """What tokens (B, c) add to those chosen so far, (B, c)."""
        new = (columns(some) - best).clamp_min(0).sum(1) * weights.gather(1, some)
        return new.masked_fill(bounds.gather(1, some) == -torch.inf, -torch.inf)

    def all_gains() -> Tensor:
        return torch.cat([gains(some) for some in every.split(FIRST, dim=1)], dim=1)

    alone = bounds = all_gains()
    chosen: list[Tensor] = []
    for number in range(k):
        if torch.compiler.is_compiling():  # a graph cannot stop where the bounds are low enough
            known = bounds = all_gains() if number else alone
        else:
            fresh = torch.ones_like(bounds, dtype=torch.bool) if not number else bounds == -torch.inf
            for _ in range(-(-n // AT_ONCE)):  # after so many rounds every gain is fresh
                sure = bounds.masked_fill(~fresh, -torch.inf).amax(1)
                hoped = bounds.masked_fill(fresh, -torch.inf).amax(1)
                if bool((hoped * (1 + SLACK) < sure).all()):
                    break
                some = bounds.masked_fill(fresh, -torch.inf).topk(min(AT_ONCE, n), dim=1).indices
                bounds, fresh = bounds.scatter(1, some, gains(some)), fresh.scatter(1, some, True)
            known = bounds.masked_fill(~fresh, -torch.inf)
        index = known.argmax(1, keepdim=True)
        chosen.append(index)
        best = torch.maximum(best, columns(index))
        bounds = bounds.scatter(1, index, -torch.inf)
    return torch.cat(chosen, dim=1), alone
