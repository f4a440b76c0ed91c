"""VisionZip: the tokens that CLS attends to most, and a few that the others are merged into.

Yang et al., "VisionZip: Longer is Better but Not Necessary in Vision Language Models", CVPR 2025, arXiv:2412.04467. Written
from the formulas; the released code is Apache-2.0.

    dominant: CLS itself and the D - 1 patches with most CLS attention (heads summed; without CLS: attention received)
    contextual: of the M others in raster order, every max(1, M // C)-th is a target, C in all
    every other one joins the target with the most similar key (mean over heads): target + mean of those that join it (a sum)

Place: at the tower's output, behind the last block but one. The authors count CLS: `visionzip:64` is CLS, 53 patches and 10
contextual tokens, so 63 come out beside CLS. C is 10 of 64 and in proportion, or the option `contextual`. A LLaVA hands no CLS
token on to its language model, so there CLS is missing; a CLIP keeps it. Positions are numbered anew by the authors; here
tokens keep theirs. Sizes do not count in later attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.attention_rows import global_attention
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, gather_rows, most_similar, positions, top


def check_options(options: Mapping[str, Any]) -> None:
    if options["contextual"] < 0:
        raise UserError(f"visionzip: contextual={options['contextual']} is below 0; 0 is 10 of 64 tokens")


@method(
    summary="the tokens that CLS attends to most, and a few that the others are merged into",
    paper='Yang et al., "VisionZip: Longer is Better but Not Necessary", CVPR, 2025, arXiv:2412.04467',
    needs=("attention",),
    selects=False,
    budget=lambda options: "64",
    where="out",
    check=check_options,
    extra=-1,
    min_keep=lambda n: min(n, 2),
    sums=True,
)
@full_precision
def visionzip(view: View, keep: int, *, contextual: int = 0) -> Reduction:
    """keep - 1 tokens: dominant patches in raster order, then contextual ones."""
    assert view.attention is not None
    scores = global_attention(view)  # (B, N); the mean over heads has the same order as the sum
    count = min(contextual or round(keep * 10 / 64), keep - 1)  # C
    dominant = top(scores, keep - 1 - count)
    is_left = torch.ones_like(scores, dtype=torch.bool).scatter(1, dominant, False)
    left = positions(is_left, view.n - dominant.shape[1])  # (B, M)
    targets = left[:, :: max(1, left.shape[1] // max(1, count))][:, :count]  # (B, C)
    index = torch.cat([dominant, targets], dim=1)
    numbers = torch.arange(keep - 1, device=index.device).expand_as(index)
    if not count:
        return Reduction.keep(dominant, view.n, scores=scores)
    keys = view.attention.keys()
    nearest = most_similar(keys, gather_rows(keys, targets)) + dominant.shape[1]  # (B, N)
    assigned = nearest.scatter(1, index, numbers)
    joins = is_left.scatter(1, targets, False).float()
    members = torch.zeros_like(numbers, dtype=torch.float32).scatter_add(1, assigned, joins)  # (B, K)
    shares = torch.where(joins > 0, 1 / members.gather(1, assigned).clamp_min(1), 1.0)
    return Reduction(index, view.n, scores=scores, assigned=assigned, shares=shares)
