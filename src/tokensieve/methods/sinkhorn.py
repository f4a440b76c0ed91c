"""Sinkhorn: tokens are shared out among learned centres, so that every centre gets as much as every other.

The baseline of Haurum et al., "Which Tokens to Use? Investigating Token Reduction in Vision Transformers", ICCV Workshops 2023,
arXiv:2308.04657. Written from the formulas; the released code is MIT.

    T = exp(cos(c_k, x_n) / eps), K x N
    3 times: rows divided by their sums, then columns by theirs      so the shares of a token add up to 1 in the end
    output_k = sum over n of T_kn x_n / |x_n|                        a sum of unit tokens, not a mean

eps = 1. Place in the comparison: before blocks 4, 7 and 10 of 12, int(196 * rate^i) tokens, CLS apart. Here alone: after half
the depth; K and the positions are a part of the weights. No sizes are passed on. The authors train the whole model and scale
the centres to length 1 in place; here the model is frozen (docs/learned-selector.md) and the centres are scaled in the formula.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.methods.cut_modules import ONE_CUT, FixedCuts, mixture
from tokensieve.methods.places import powers_of_share
from tokensieve.methods.registry import method
from tokensieve.scoring import cosine, full_precision

ROUNDS = 3
TINY = torch.finfo(torch.float32).tiny


class Centres(nn.Module):
    """The centres of one cut. (B, N, D) -> their cosines to the tokens (B, K, N)."""

    def __init__(self, width: int, keep: int) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(keep, width))

    def forward(self, x: Tensor) -> Tensor:
        return cosine(self.centres.expand(x.shape[0], -1, -1), x)


class CentresOfCuts(FixedCuts):
    """The centres of all cuts."""

    def __init__(self, width: int, cuts: Mapping[str, int] = ONE_CUT) -> None:
        super().__init__(width, cuts, Centres)


@method(
    summary="tokens shared out evenly among learned centres, which become sums of unit tokens (--weights)",
    paper='Haurum et al., "Which Tokens to Use?", ICCV Workshops, 2023, arXiv:2308.04657',
    selects=False,
    mixes=True,
    sums=True,
    part=CentresOfCuts,
    count=powers_of_share,
    recipe="tokensieve train configs/sinkhorn.yaml",
)
@full_precision
def sinkhorn(view: View, keep: int, *, eps: float = 1.0) -> Reduction:
    """Sums of unit tokens by balanced shares, in logarithms."""
    shares = view.part(view) / max(eps, TINY)
    for _ in range(ROUNDS):
        shares = shares.log_softmax(2)
        shares = shares.log_softmax(1)
    return mixture(view, shares.exp() / view.tokens.float().norm(dim=-1).clamp_min(TINY)[:, None])
