"""The greedy choice of farthest-point methods: each time the token with the largest of the least values to those chosen so far.

    c_1 is given,   c_{t+1} = argmax_j min_{s <= t} V[c_s, j]

The choice takes many small steps, one after the other. For a small batch on the CPU they are done in numpy, where a call costs
less than in torch. The tokens are the same.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SMALL_BATCH = 8  # images up to which numpy is faster (196 tokens: 8 times at batch 1, as fast at 12)


@torch.no_grad()
def choose_apart(values: Tensor, first: Tensor, k: int) -> Tensor:
    """k tokens of each image in the order in which they are chosen, (B, K). Of equal ones the first is chosen.

    Args:
        values: (B, N, N), float32; on the diagonal less than anywhere else, so that no token is chosen again.
        first: (B,), the first token.
    """
    if not torch.compiler.is_compiling() and values.device.type == "cpu" and 0 < len(values) <= SMALL_BATCH:
        rows = values.detach().numpy()
        return torch.from_numpy(np.stack([_choose(rows[i], int(one), k) for i, one in enumerate(first)]))
    flat, starts = values.flatten(0, 1), torch.arange(values.shape[0], device=values.device) * values.shape[1]
    order, least = [first], flat.index_select(0, first + starts)  # (B, N)
    for _ in range(k - 1):
        chosen = least.argmax(-1)
        order.append(chosen)
        least = torch.minimum(least, flat.index_select(0, chosen + starts))
    return torch.stack(order, dim=1)


def _choose(rows: np.ndarray, first: int, k: int) -> np.ndarray:
    order, least = np.empty(k, dtype=np.int64), rows[first].copy()
    order[0] = first
    for step in range(1, k):
        order[step] = chosen = least.argmax()
        np.minimum(least, rows[chosen], out=least)
    return order
