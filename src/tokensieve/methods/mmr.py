"""MMR: one token after the other, each important and unlike those chosen before (maximal marginal relevance).

The rule of IDPruner (arXiv:2602.13315), ID-Selection and of a public patch of SGLang ("UniAttn", Apache-2.0), which deployers
use on embeddings after the merger. Written from its formula.

    m = min-max of the importance over the tokens of an image     the attention that tokens get; 0 where all are equal
    choose argmax_i  m_i - lambda max_{j chosen} cos(x_i, x_j)    the first by m alone; lambda = 0.3

With lambda = 0 it is exactly the top K of the importance. Importance is the CLS row of the block before the cut, in a decoder
the row of the last token of the prompt, without a CLS token the attention received. Ties go to the first token. Place: at the
tower's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, minmax


def check_options(options: Mapping[str, Any]) -> None:
    if options["penalty"] < 0:
        raise UserError(f"mmr: penalty={options['penalty']} is below 0; 0 is importance alone")


@method(
    summary="one token after the other, important and unlike those chosen before",
    paper="the rule of IDPruner and ID-Selection, 2025-26",
    needs=("attention",),
    check=check_options,
    budget=lambda options: "25%",
    where="out",
)
@full_precision
def mmr(view: View, keep: int, *, penalty: float = 0.3) -> Reduction:
    """Greedy choice by importance minus the largest cosine to a chosen token."""
    unit = F.normalize(view.tokens.float(), dim=-1)  # (B, N, D)
    scores = minmax(view.coarse().float())  # (B, N)
    image = torch.arange(unit.shape[0], device=unit.device)
    nearest = torch.full_like(scores, -torch.inf)  # the largest cosine to a chosen token
    gain, chosen = scores, []
    for _ in range(keep):
        at = gain.argmax(1)  # (B,)
        chosen.append(at)
        nearest = torch.maximum(nearest, (unit * unit[image, at][:, None]).sum(-1))
        gain = (scores - penalty * nearest).scatter(1, torch.stack(chosen, 1), -torch.inf)
    return Reduction.keep(torch.stack(chosen, dim=1), view.n, scores=scores)
