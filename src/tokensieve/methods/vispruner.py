"""VisPruner: half of the tokens by CLS attention, and of the others those without near duplicates.

Zhang et al., "Beyond Text-Visual Attention: Exploiting Visual Cues for Effective Token Pruning in VLMs", ICCV 2025,
arXiv:2412.01818. Written from the formulas; the released code is Apache-2.0.

    important: the int(q T) patches with most CLS attention (mean over heads)
    the others, by falling attention: again and again, alternate tokens are A and B; of A those with the highest cosine to any
    token of B are removed, at most 8 at a time, until T - int(q T) are left
    next order: the tokens of A that stay, by falling similarity, then B

Place: at the tower's output; q = 0.75 at 64 tokens and 0.5 at any other number (`important=0` chooses so). Kept tokens are in
raster order. The rule is chaotic: rounding to 16 bits changes a third of the choice, so cosines are in float32. An odd number
of tokens, at which the released code stops, gives A one more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.attention_rows import global_attention
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, gather_rows

AT_ONCE = 8


def check_options(options: Mapping[str, Any]) -> None:
    if not 0 <= options["important"] <= 1:
        raise UserError(f"vispruner: important={options['important']} is not a share of the tokens; 0 chooses by their number")


@method(
    summary="half of the tokens by CLS attention, and of the others those without near duplicates",
    paper='Zhang et al., "Beyond Text-Visual Attention", ICCV, 2025, arXiv:2412.01818',
    needs=("attention",),
    budget=lambda options: "128",
    where="out",
    check=check_options,
)
@full_precision
def vispruner(view: View, keep: int, *, important: float = 0.0) -> Reduction:
    """Important tokens, and diverse ones of the rest."""
    scores = global_attention(view)
    share = important or (0.75 if keep == 64 else 0.5)
    order = scores.argsort(dim=1, descending=True, stable=True)
    first, rest = order[:, : int(share * keep)], order[:, int(share * keep) :]
    unit, target = F.normalize(view.tokens.float(), dim=-1), keep - int(share * keep)
    while rest.shape[1] > target:
        a, b = rest[:, ::2], rest[:, 1::2]
        similar = (gather_rows(unit, a) @ gather_rows(unit, b).transpose(1, 2)).amax(-1)  # (B, |A|)
        falling = similar.argsort(dim=1, descending=True, stable=True)
        a = a.gather(1, falling[:, min(AT_ONCE, rest.shape[1] - target) :])
        rest = torch.cat([a, b], dim=1)
    return Reduction.keep(torch.cat([first, rest], dim=1), view.n, scores=scores)
