"""FlowCut: the tower is pruned block by block; how much at a time follows the entropy of the attention of CLS.

"FlowCut: Rethinking Redundancy via Information Flow for Efficient Vision-Language Models", NeurIPS 2025, arXiv:2505.19536.
Written from its rule; the released code is Apache-2.0.

    a = CLS attention, mean over heads; v_i: the mean value
    s = mean over heads of softmax over all tokens, CLS too, of v_cls . v_i; then the patches alone
    score_i = (a_i / sum a + s_i / sum s) ||v_i||_1;   c <- c / 2 + score / 2 in every block, c = score in the first
    with L blocks, at block i (from 0): left = L - 2 - i - 1
    left even: prune round((N - T) / sqrt(left) (1 - (H / ln N)^2)) tokens, H the entropy of a / sum a;   left = 0: down to T
    the best by c are kept, in raster order, after the MLP of that block

Place: after every block. L counts all blocks of the model, also those that a LLaVA does not run. T patches are left from the
last block but two on; CLS is not counted (the authors count it). N is the image's own number of patches, so images differ on
the way; the released code prunes as many as the image of a batch that loses most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import Place, method
from tokensieve.scoring import full_precision

TINY = torch.finfo(torch.float32).tiny


def count(place: Place, options: Mapping[str, Any]) -> int:
    """T, a share of the tokens before any cut."""
    return place.keep_first


@method(
    summary="pruned block by block, by a running score of attention and values",
    paper='"FlowCut: Rethinking Redundancy via Information Flow for Efficient VLMs", NeurIPS, 2025, arXiv:2505.19536',
    needs=("attention", "values"),
    adaptive=True,
    budget=lambda options: "25%",
    where="*",
    count=count,
)
@full_precision
def flowcut(view: View, keep: int) -> Reduction:
    """One block: the running score, and the tokens that it leaves of each image."""
    assert view.attention is not None and view.attention.v is not None
    attention, p = view.coarse().float(), view.attention.prefix
    share = attention / attention.sum(1, keepdim=True).clamp_min(TINY)
    values = view.attention.v.float()  # (B, H, P+N, d)
    whole = values[:, :, :1] if view.attention.has_cls and p else values[:, :, p:].mean(2, keepdim=True)
    flow = (whole * values).sum(-1).softmax(-1).mean(1)[:, p:]  # (B, N)
    score = (share + flow / flow.sum(1, keepdim=True).clamp_min(TINY)) * values[:, :, p:].mean(1).abs().sum(-1)
    running = score if view.carried is None else (view.carried + score) / 2
    left = (view.full_depth or view.depth) - 2 - (view.layer - 1) - 1
    kept = _kept(share, keep, left)
    rank = running.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    reduction = Reduction.keep_some(rank < kept[:, None], view.sizes, running)
    reduction.carry = running
    return reduction


def _kept(share: Tensor, keep: int, left: int) -> Tensor:
    """How many tokens of each image are left at a block, (B,); share (B, N) of the attention."""
    n = share.shape[1]
    everything = torch.full_like(share[:, 0], n, dtype=torch.long)
    if left < 0 or left % 2:
        return everything
    if left == 0:
        return everything.clamp_max(keep)
    entropy = -(share * share.clamp_min(TINY).log()).sum(1)
    evenness = entropy / max(math.log(n), TINY)
    pruned = ((n - keep) / left**0.5 * (1 - evenness**2)).round().long().clamp_min(0)
    return torch.maximum(everything - pruned, everything.clamp_max(keep))
