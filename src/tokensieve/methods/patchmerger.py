"""PatchMerger: learned queries, each of which makes one output token of all tokens that are like it.

Renggli et al., "Learning to Merge Tokens in Vision Transformers", arXiv:2202.12015, 2022; compared with others in Haurum et
al., "Which Tokens to Use?", ICCV Workshops 2023, arXiv:2308.04657, whose code is MIT. Written from the formulas.

    y = LN(x),  W = softmax over tokens of Q y^T (no scale),  output = W y          Q: K x D, learned; CLS is apart

Place there: once, after half the depth, K = 8; in the comparison before blocks 4, 7 and 10 of 12, int(196 * rate^i) tokens. K
is a part of the weights, which hold one merger for each position of the plan they were trained for. No sizes are passed on.

The authors train the whole model. Here it is frozen, and the merger learns to give it its outputs (docs/learned-selector.md).
The outputs are normed tokens, as released, so the frozen blocks behind see tokens of another length than they know; the gain
and bias of the norm can learn it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.methods.cut_modules import ONE_CUT, FixedCuts, centred, mixture, spread
from tokensieve.methods.places import powers_of_share
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision


class Queries(nn.Module):
    """The queries of one cut. (B, N, D) -> W (B, K, N)."""

    def __init__(self, width: int, keep: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(torch.randn(keep, width))

    def forward(self, x: Tensor) -> tuple[Tensor, nn.LayerNorm]:
        return (self.queries @ self.norm(x).transpose(1, 2)).softmax(-1), self.norm


class PatchMergers(FixedCuts):
    """The queries of every cut."""

    def __init__(self, width: int, cuts: Mapping[str, int] = ONE_CUT) -> None:
        super().__init__(width, cuts, Queries)


@method(
    summary="learned queries, each of which makes one token of all that are like it (--weights)",
    paper='Renggli et al., "Learning to Merge Tokens in Vision Transformers", 2022, arXiv:2202.12015',
    selects=False,
    mixes=True,
    sums=True,
    part=PatchMergers,
    count=powers_of_share,
    recipe="tokensieve train configs/patchmerger.yaml",
)
@full_precision
def patchmerger(view: View, keep: int) -> Reduction:
    """W LN(x), as a sum of tokens: a LayerNorm is linear in its token but for the division by the spread."""
    weight, norm = view.part(view)
    return mixture(view, weight / spread(view.tokens.float(), norm.eps)[:, None], partial(_finish, norm))


def _finish(norm: nn.LayerNorm, y: Tensor) -> Tensor:
    return centred(y) * norm.weight + norm.bias
