"""Max-min diversity by cosine: each next token is the one least similar to the most similar token chosen so far.

    s_1 = argmax_i min_{j != i} D_ij,   s_{t+1} = argmax_i min_{s chosen} D_is,   D = 1 - cos

A running maximum of cosines makes it O(K N D) time and O(N) memory beside the tokens. Of equal ones the first is chosen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.scoring import full_precision

ROWS = 256  # cosines in memory at a time: so many rows of each image


@full_precision
def loneliest(tokens: Tensor) -> Tensor:
    """The token of (B, N, D) whose most similar other token is least similar to it: (B,)."""
    z = F.normalize(tokens.float(), dim=-1)
    nearest = []
    for start in range(0, z.shape[1], ROWS):
        rows = z[:, start : start + ROWS]
        itself = torch.arange(start, start + rows.shape[1], device=z.device)[None, :, None].expand(z.shape[0], -1, 1)
        nearest.append((rows @ z.transpose(1, 2)).scatter(2, itself, -torch.inf).amax(2))  # (B, rows)
    return torch.cat(nearest, dim=1).argmin(1)


@full_precision
def most_diverse(tokens: Tensor, k: int, first: Tensor) -> Tensor:
    """k tokens of (B, N, D), in the order in which they are chosen, from first (B,) on: (B, K)."""
    z = F.normalize(tokens.float(), dim=-1)
    image, chosen = torch.arange(z.shape[0], device=z.device), [first]
    nearest = z.new_full(z.shape[:2], -torch.inf)  # (B, N), cosine to the most similar token chosen
    for _ in range(k - 1):
        last = chosen[-1]
        nearest = torch.maximum(nearest, (z[image, last][:, None] @ z.transpose(1, 2))[:, 0])  # the other way round is slower
        nearest = nearest.scatter(1, last[:, None], torch.inf)  # never again, also among equal tokens
        chosen.append(nearest.argmin(1))
    return torch.stack(chosen, dim=1)
