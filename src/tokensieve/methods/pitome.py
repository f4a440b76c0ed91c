"""PiToMe: tokens with much energy, which many others are like, are merged; the others are protected.

Tran et al., "Accelerating Transformers with Spectrum-Preserving Token Merging", NeurIPS 2024, arXiv:2405.16148. Written from
the formulas; the released code is MIT.

    E_i = mean over the patches j of ELU(cos(m_i, m_j) - margin)      m: keys, mean over heads
    the tokens in the order of falling E
    first half of the blocks: ToMe's matching of that order, even ranks to odd ranks, the r best edges
    second half: of the 2 r first, each even rank joins the most similar odd rank; the others are protected
    size-weighted mean

Place: between attention and MLP of every block; the authors keep a ratio of the patches, `pitome:90%`. margin = 0.75 (1 - i /
L) for DeiT, i from 0. For CLIP the authors use 0.95 (1 - i / L), the tokens themselves and the second form in all blocks:
`pitome(clip=true)`. Later attention adds log(size) here (the released DeiT block passes no sizes on: `sizes=no`). At most half
of the patches go at one block.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.matching import min_keep
from tokensieve.methods.registry import method
from tokensieve.scoring import cosine, full_precision, positions


@method(
    summary="tokens that many others are like are merged, the others protected",
    paper='Tran et al., "Accelerating Transformers with Spectrum-Preserving Token Merging", NeurIPS, 2024, arXiv:2405.16148',
    needs=("attention",),
    selects=False,
    norm=0.0,
    budget=lambda options: "90%",
    where="*.attn",
    min_keep=min_keep,
)
@full_precision
def pitome(
    view: View, keep: int, *, margin: float = -1.0, form: Literal["auto", "all", "protected"] = "auto", clip: bool = False
) -> Reduction:
    """One matching. margin: -1 for that of the depth. form: all tokens are matched, or the first 2 r alone; auto: by depth."""
    assert view.attention is not None
    r, i = view.n - max(keep, min_keep(view.n)), max(0, view.layer - 1)
    if margin < 0:
        margin = (0.95 if clip else 0.75) * (1 - i / max(1, view.depth))
    metric = view.tokens.float() if clip else view.attention.keys()
    energy = energies(metric, margin)
    order = energy.argsort(dim=1, descending=True, stable=True)  # (B, N)
    matches_all = form == "all" or (form == "auto" and not clip and i < math.ceil(view.depth / 2))
    groups, index = (_match_all if matches_all else _match_first)(metric, order, r)
    return Reduction.merge(groups, index, view.sizes_or_ones(), energy)


def energies(metric: Tensor, margin: float) -> Tensor:
    """E of each token (B, N, d): (B, N)."""
    return F.elu(cosine(metric, metric) - margin).mean(-1)


def _match_all(metric: Tensor, order: Tensor, r: int) -> tuple[Tensor, Tensor]:
    return _merge_pairs(metric, order[:, ::2], order[:, 1::2], r)


def _match_first(metric: Tensor, order: Tensor, r: int) -> tuple[Tensor, Tensor]:
    return _merge_pairs(metric, order[:, : 2 * r : 2], order[:, 1 : 2 * r : 2], r)


def _merge_pairs(metric: Tensor, senders: Tensor, receivers: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Groups and representatives when the r senders (B, S) most similar to a receiver (B, R) join theirs."""

    def at(index: Tensor) -> Tensor:
        return metric.gather(1, index[..., None].expand(-1, -1, metric.shape[2]))

    similarity, partner = cosine(at(senders), at(receivers)).max(-1)  # (B, S)
    best = similarity.argsort(dim=1, descending=True, stable=True)[:, :r]
    sent, goal = senders.gather(1, best), receivers.gather(1, partner.gather(1, best))
    position = torch.arange(metric.shape[1], device=metric.device).expand(metric.shape[0], -1)
    target = position.scatter(1, sent, goal)  # where each token ends
    stays = target == position
    index = positions(stays, metric.shape[1] - r)
    number = stays.long().cumsum(1) - 1
    return number.gather(1, target), index
