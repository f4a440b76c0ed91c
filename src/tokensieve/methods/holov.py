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

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, positions

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
    starts = [-(-number * view.n // crops) for number in range(crops + 1)]
    inside = [slice(*bounds) for bounds in itertools.pairwise(starts)]  # the tokens of each crop
    size = torch.tensor([part.stop - part.start for part in inside], device=attention.device)  # (C,)
    crop = torch.arange(view.n, device=attention.device) * crops // view.n  # (N,)
    scores = ATTENTION_SCALE * attention
    variety = _variety(F.normalize(view.tokens.float(), dim=-1), inside)
    variety = variety * scores.mean(1, keepdim=True) / variety.mean(1, keepdim=True).clamp_min(TINY)
    scores = scores + VARIETY * variety
    means = torch.zeros_like(scores[:, :crops]).index_add(1, crop, scores) / size
    quota = fill_quotas((means.softmax(-1) * keep).floor().long(), means, size, keep)  # (B, C)
    ranks = [attention[:, part].argsort(dim=1, descending=True, stable=True).argsort(dim=1) for part in inside]
    rank = torch.cat(ranks, dim=1)  # (B, N), of each token in its crop
    index = positions(rank < quota[:, crop], keep)
    return Reduction.keep(index, view.n, scores=scores)


def _variety(unit: Tensor, inside: Sequence[slice]) -> Tensor:
    """The variance of the cosines of each token (B, N, D) to the others of its crop, 0 with itself: (B, N)."""
    parts = []
    for part in inside:
        similar = unit[:, part] @ unit[:, part].transpose(1, 2)
        similar = similar * (1 - torch.eye(similar.shape[1], device=unit.device))
        parts.append(similar.var(-1, unbiased=False))
    return torch.cat(parts, dim=1)


def fill_quotas(quota: Tensor, weights: Tensor, size: Tensor, total: int) -> Tensor:
    """Quotas (B, C) that are within the sizes (C,) and add up to the total: one more for the heaviest that have room.

    In each round every crop with room gets one, the heaviest first; what is missing are the first of these places.
    """
    quota, crops = torch.minimum(quota, size), quota.shape[1]
    place = weights.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # (B, C), 0: the heaviest
    rounds = torch.arange(total, device=quota.device)
    has_room = rounds < (size - quota)[..., None]  # (B, C, T)
    turn = torch.where(has_room, rounds * crops + place[..., None], total * crops)  # the order of the places
    missing = total - quota.sum(1)  # (B,)
    number = turn.flatten(1).argsort(dim=1, stable=True).argsort(dim=1)  # (B, C T)
    return quota + (number < missing[:, None]).view_as(turn).sum(-1)
