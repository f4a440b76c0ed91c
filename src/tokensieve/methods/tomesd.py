"""ToMe-SD: the top left patch of every 2 x 2 receives, the other three send to the most similar receiver.

Bolya and Hoffman, "Token Merging for Fast Stable Diffusion", CVPR Workshops 2023, arXiv:2303.17604. Written from the formulas;
the released code is MIT.

    receivers = the top left of each 2 x 2 cell of the grid; all others send, and so does a row or column that is left over
    each sender finds its most similar receiver                              cosine of the tokens
    the r senders with the highest cosine are merged into theirs             plain mean: sizes do not count

Place: before attention and MLP of the blocks of a U-Net, with unmerging behind them. Here it is a reduction like others, after
half the depth by default; nothing is unmerged. At least the receivers stay, a quarter of the patches. The grid must be
complete, so it is the first cut of a tower; elsewhere tokens are taken as one row, of which every fourth receives.
Of equal cosines the first wins. Tokens come out in raster order of what represents them.
"""

from __future__ import annotations

import torch

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.scoring import cosine, full_precision, positions


@method(
    summary="the most similar patches merged into the top left patch of a 2 x 2 cell",
    paper='Bolya and Hoffman, "Token Merging for Fast Stable Diffusion", CVPR Workshops, 2023, arXiv:2303.17604',
    selects=False,
    budget=lambda options: "50%",
    norm=0.0,
    min_keep=lambda n: -(-n // 4),
)
@full_precision
def tomesd(view: View, keep: int) -> Reduction:
    """One matching of senders to receivers."""
    h, w = (1, view.n) if view.grid is None else (view.grid[-2], view.grid[-1])
    at = torch.arange(view.n, device=view.tokens.device)
    down, right = (1, 4) if h == 1 else (4, 1) if w == 1 else (2, 2)
    corners = {y * w + x for y in range(0, h - h % down, down) for x in range(0, w - w % right, right)} or {0}
    receivers = torch.tensor([i for i in range(view.n) if i % (h * w) in corners], device=at.device)  # (R,)
    senders = torch.tensor([i for i in range(view.n) if i % (h * w) not in corners], device=at.device)  # (S,)
    keep = max(keep, len(receivers))
    similarity, partner = cosine(view.tokens[:, senders], view.tokens[:, receivers]).max(-1)  # (B, S)
    order = similarity.sort(dim=-1, descending=True, stable=True).indices
    sent = order[:, : view.n - keep]  # (B, r)
    goal = receivers[partner]  # (B, S)
    batch = view.tokens.shape[0]
    target = at.expand(batch, -1).scatter(1, senders[sent], goal.gather(1, sent))  # (B, N), where each token ends
    stays = target == at
    index = positions(stays, keep)
    number = stays.int().cumsum(1) - 1  # (B, N), of the output token of each one that stays
    groups = number.gather(1, target).long()
    ones = torch.ones_like(target, dtype=torch.float32)
    merged = Reduction.merge(groups, index, ones)
    sizes = torch.zeros_like(merged.index, dtype=torch.float32).scatter_add(1, groups, view.sizes_or_ones())
    merged.sizes = sizes
    return merged
