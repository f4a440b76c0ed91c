"""VScan: half of the tokens by a local scan of an early block, half by a global scan of the last; the rest is merged into them.

"VScan: Rethinking Visual Token Reduction for Efficient Large Vision-Language Models", TMLR 2026, arXiv:2505.22654. Written
from its rule; the released code is MIT.

    local: CLS attention of an early block (6 of 24); the best T/2 of the windows of the grid, the same number in each
    global: CLS attention of the block before the cut, local picks set to 0; the best T - T/2
    every other token goes to its most similar chosen one: (chosen + sum of its tokens) / (1 + their count)

Stage 1, at the tower's output. Stage 2 keeps the best tokens by the last row of attention of layer 16 of 32, which is
`pyramiddrop` at one layer: `vscan@out:96 + pyramiddrop@llm.16:32` is the authors' "64". Windows are quarters of the grid's
sides (6 x 6 of 24 x 24 patches). The released code takes floor(T/2 / 16) of each window and loses the remainder; here it goes
to the windows whose next token has most attention. Without CLS, the attention received. Attention is the mean over heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.attention_rows import from_cls
from tokensieve.methods.joining import join_chosen
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, positions

WINDOWS = 4  # along each side


def early_block(depth: int) -> tuple[int, ...]:
    """Block 6 of 24, or at the same depth of another tower."""
    return (max(1, round(depth / 4)),)


@method(
    summary="half of the tokens by an early block in windows, half by the last; the rest merged into them",
    paper='"VScan: Rethinking Visual Token Reduction for Efficient Large Vision-Language Models", TMLR, 2026, arXiv:2505.22654',
    needs=("attention",),
    selects=False,
    budget=lambda options: "17%",
    where="out",
    layers=early_block,
)
@full_precision
def vscan(view: View, keep: int) -> Reduction:
    """Local and global picks in raster order, and their groups."""
    assert view.attention is not None
    early = next(iter(view.earlier.values()))
    local = local_picks(from_cls(early), view.grid, keep // 2)  # (B, N)
    scores = view.coarse().float()
    ranking = scores.masked_fill(local, 0.0) - local.float()  # local picks are taken already
    order = ranking.sort(dim=1, descending=True, stable=True).indices[:, : keep - keep // 2]
    chosen = local.scatter(1, order, True)
    index = positions(chosen, keep)
    return join_chosen(view.tokens, index, scores)


def local_picks(attention: Tensor, grid: tuple[int, ...] | None, count: int) -> Tensor:
    """The best tokens of each window, the same number in each; what is left over goes to the largest next ones. (B, N), bool"""
    n = attention.shape[1]
    h, w = (1, n) if grid is None else (grid[-2], grid[-1])
    at = torch.arange(n, device=attention.device)
    row, column = (at // w) % h, at % w
    window = (row * min(WINDOWS, h) // h) * min(WINDOWS, w) + column * min(WINDOWS, w) // w  # (N,)
    windows = min(WINDOWS, h) * min(WINDOWS, w)
    best = attention.sort(dim=1, descending=True, stable=True).indices  # (B, N)
    rank = torch.empty_like(best)
    for number in range(windows):  # the place of each token among those of its window
        inside = window[best] == number
        rank.scatter_(1, best, torch.where(inside, inside.int().cumsum(1) - 1, rank.gather(1, best)))
    order = (rank * 2.0 - attention / attention.amax(1, keepdim=True).clamp_min(1e-30)).argsort(dim=1, stable=True)
    return torch.zeros_like(best, dtype=torch.bool).scatter(1, order[:, :count], True)
