"""HoloV: tokens from all over the image; crops with much attention and varied content get more of them.

Zou et al., "Don't Just Chase Highlighted Tokens in MLLMs: Revisiting Visual Holistic Context Retention", NeurIPS 2025,
arXiv:2510.02912. Written from its rule; the released code is Apache-2.0 by its README.

    16 crops of neighbouring tokens in raster order; the first N mod 16 have one token more
    per token i of a crop of M: score_i = 1000 a_i + 0.09 s v_i      a: CLS attention
        v_i = sum_j (c_ij - m_i)^2 / (M - 1)      c: cosines to the crop, 0 with itself;  m_i = sum_j c_ij / (M - 1)
        s = the crop's mean of 1000 a / its mean of v
    w = the mean score of each crop over the sum of these means
    quota = floor(w T), one more for each of the heaviest crops until T
    inside a crop, by attention alone

Place: at the tower's output. What exceeds a crop goes to the next heaviest one, and from the lightest to the heaviest again;
the released code loses it. A crop of one token scores 1000 a; the released code leaves it unscaled.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, positions

CROPS, ATTENTION_SCALE, VARIETY, EPS = 16, 1e3, 0.09, 1e-6


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
    inside = torch.arange(view.n, device=attention.device).tensor_split(min(CROPS, view.n))  # the tokens of each crop
    size = torch.tensor([len(part) for part in inside], device=attention.device)  # (C,)
    unit = F.normalize(view.tokens.float(), dim=-1)
    scores = torch.cat([_crop_scores(attention[:, part], unit[:, part]) for part in inside], dim=1)  # (B, N)
    means = torch.stack([score.mean(1) for score in scores.split(size.tolist(), dim=1)], dim=1)  # (B, C)
    quota = crop_quotas(means / (means.sum(1, keepdim=True) + EPS), size, keep)  # (B, C)
    ranks = [attention[:, part].argsort(dim=1, descending=True, stable=True).argsort(dim=1) for part in inside]
    taken = [rank < quota[:, crop, None] for crop, rank in enumerate(ranks)]
    index = positions(torch.cat(taken, dim=1), keep)
    return Reduction.keep(index, view.n, scores=scores)


def _crop_scores(attention: Tensor, unit: Tensor) -> Tensor:
    """The scores of the tokens of one crop, of their attention (B, M) and direction (B, M, D): (B, M)."""
    size = attention.shape[1]
    others = max(1, size - 1)
    cosines = (unit @ unit.transpose(1, 2)) * (1 - torch.eye(size, device=unit.device))  # (B, M, M)
    mean = cosines.sum(-1, keepdim=True) / others
    variety = (cosines - mean).square().sum(-1) / others  # (B, M)
    scaled = ATTENTION_SCALE * attention
    return scaled + VARIETY * variety * scaled.mean(1, keepdim=True) / (variety.mean(1, keepdim=True) + EPS)


def crop_quotas(weights: Tensor, size: Tensor, total: int) -> Tensor:
    """Quotas (B, C) by weights (B, C), within the sizes (C,), that add up to the total."""
    heaviest = weights.argsort(dim=1, descending=True, stable=True)  # (B, C)
    quota = (weights * total).floor().long().gather(1, heaviest)  # from here on the heaviest crop comes first
    rest = total - quota.sum(1, keepdim=True)
    quota = quota + (torch.arange(len(size), device=quota.device) < rest)
    room, over, parts = size[heaviest], torch.zeros_like(rest[:, 0]), list(quota.unbind(1))
    for place in (*range(len(size)), *range(len(size))):  # what is over goes down, then to the heaviest again
        wanted = parts[place] + over
        parts[place] = torch.minimum(wanted, room[:, place])
        over = wanted - parts[place]
    return torch.zeros_like(quota).scatter(1, heaviest, torch.stack(parts, dim=1))
