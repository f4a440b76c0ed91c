"""PACT, its clustering: tokens in dense places become centres if they are far from all centres; the others are merged into
them.

Dhouib et al., "PACT: Pruning and Clustering-Based Token Reduction for Faster Visual Language Models", CVPR 2025,
arXiv:2504.08966. Written from the formulas of its clustering step (DBDPC); the released code is MIT.

    d_ij = 1 - cos of keys                         of all heads together
    density_i = sum_j exp(-(d_ij / 2)^2)
    down the order of density, a token becomes a centre if it is farther than `cutoff` from all centres
    every other token joins its nearest centre; the mean of its members replaces a centre

The number of tokens is the image's own; a budget is the most: if there are more centres, the densest stay. Place: in an early
layer of the language model (before layer 4 of 28), or in a tower. Attention counts the members of a merged token there, which
is the option `sizes`. The pruning of unimportant tokens that precedes the clustering in the paper is a step of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision


def check_options(options: Mapping[str, Any]) -> None:
    if not 0 <= options["cutoff"] <= 2:
        raise UserError(f"pact: cutoff={options['cutoff']} is not from 0 to 2, the range of cosine distances")


@method(
    summary="dense tokens that are far apart become centres, all others are merged into them",
    paper='Dhouib et al., "PACT", CVPR, 2025, arXiv:2504.08966',
    needs=("attention",),
    selects=False,
    adaptive=True,
    norm=0.0,
    budget=lambda options: "100%",
    check=check_options,
    where=lambda depth, decoder: f"llm.{max(1, round(decoder / 7))}" if decoder else f"{max(1, depth // 2)}",
)
@full_precision
def pact(view: View, keep: int, *, cutoff: float = 0.21) -> Reduction:
    """Centres and their groups, image by image."""
    assert view.attention is not None
    keys = view.attention.k[:, :, view.attention.prefix :].float().transpose(1, 2).flatten(2)  # (B, N, H d)
    unit, sizes = F.normalize(keys, dim=-1), view.sizes_or_ones()
    return Reduction.stack([_cluster(unit[b], sizes[b], keep, cutoff) for b in range(len(unit))])


def _cluster(unit: Tensor, sizes: Tensor, keep: int, cutoff: float) -> Reduction:
    """Of one image: unit keys (N, d)."""
    distance = 1 - unit @ unit.T  # (N, N)
    density = torch.exp(-((distance / 2) ** 2)).sum(1)
    order = density.sort(descending=True, stable=True).indices.tolist()
    nearest, centres = torch.full_like(density, torch.inf), list[int]()
    for token in order:
        if len(centres) == keep:
            break
        if float(nearest[token]) > cutoff:
            centres.append(token)
            nearest = torch.minimum(nearest, distance[token])
    index = torch.tensor(sorted(centres), device=unit.device)
    groups = distance[:, index].argmin(1)
    groups[index] = torch.arange(len(index), device=unit.device)
    return Reduction.merge(groups[None], index[None], sizes[None], density[None])
