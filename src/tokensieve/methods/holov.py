"""HoloV: tokens from all over the image; crops with much attention and varied content get more of them.

Zou et al., "Don't Just Chase Highlighted Tokens in MLLMs: Revisiting Visual Holistic Context Retention", NeurIPS 2025,
arXiv:2510.02912. Written from its rule.

    16 crops of neighbouring tokens in raster order
    per token: 1000 a_cls + 0.09 v      v: variance of its cosines to its crop (0 with itself), scaled to the mean of 1000 a_cls
    w = softmax over the crops of their mean score;  quota = floor(w T), one more for the heaviest crops until T
    inside a crop, by attention alone

Place: at the tower's output. What exceeds a crop goes to the next heaviest one; the released code loses it. The rule says that
the score is weighed by crop, not how: the softmax of means is our reading.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision

CROPS, ATTENTION_SCALE, VARIETY = 16, 1e3, 0.09
TINY = torch.finfo(torch.float32).tiny


@method(
    summary="tokens from all crops of the image; crops with much attention and varied content get more",
    paper='Zou et al., "Revisiting Visual Holistic Context Retention", NeurIPS, 2025, arXiv:2510.02912',
    needs=("attention",),
    budget=lambda options: "25%",
    where="out",
)
@full_precision
def holov(view: View, keep: int) -> Reduction:
    """The most attended tokens of each crop, as many as its quota."""
    attention = view.coarse().float()  # (B, N)
    crops = min(CROPS, view.n)
    crop = torch.arange(view.n, device=attention.device) * crops // view.n  # (N,)
    size = torch.bincount(crop, minlength=crops)  # (C,)
    scores = ATTENTION_SCALE * attention
    variety = _variety(F.normalize(view.tokens.float(), dim=-1), crop)
    variety = variety * scores.mean(1, keepdim=True) / variety.mean(1, keepdim=True).clamp_min(TINY)
    scores = scores + VARIETY * variety
    means = torch.zeros_like(scores[:, :crops]).index_add(1, crop, scores) / size
    quota = fill_quotas((means.softmax(-1) * keep).floor().long(), means, size, keep)  # (B, C)
    rank = torch.zeros_like(crop).expand_as(attention).clone()
    for number in range(crops):
        inside = (crop == number).nonzero()[:, 0]
        rank[:, inside] = attention[:, inside].argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    index = (rank < quota[:, crop]).nonzero()[:, 1].view(len(attention), keep)
    return Reduction.keep(index, view.n, scores=scores)


def _variety(unit: Tensor, crop: Tensor) -> Tensor:
    """The variance of the cosines of each token (B, N, D) to the others of its crop, 0 with itself: (B, N)."""
    out = torch.zeros_like(unit[..., 0])
    for number in crop.unique().tolist():
        inside = (crop == number).nonzero()[:, 0]
        similar = unit[:, inside] @ unit[:, inside].transpose(1, 2)
        similar = similar * (1 - torch.eye(len(inside), device=unit.device))
        out[:, inside] = similar.var(-1, unbiased=False)
    return out


def fill_quotas(quota: Tensor, weights: Tensor, size: Tensor, total: int) -> Tensor:
    """Quotas (B, C) that are within the sizes (C,) and add up to the total: one more for the heaviest that have room."""
    quota = torch.minimum(quota, size)
    order = weights.argsort(dim=1, descending=True, stable=True)
    while bool((quota.sum(1) < total).any()):
        for place in range(quota.shape[1]):
            at = order[:, place : place + 1]
            room = (quota.gather(1, at) < size[at]) & (quota.sum(1, keepdim=True) < total)
            quota = quota.scatter_add(1, at, room.long())
    return quota
