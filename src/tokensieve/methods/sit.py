"""SiT: a small network says how much every token goes into each of K output tokens.

Zong et al., "Self-slimmed Vision Transformer", ECCV 2022, arXiv:2111.12624; compared with others in Haurum et al., "Which
Tokens to Use?", ICCV Workshops 2023, arXiv:2308.04657, whose code is MIT. Written from the formulas.

    W = softmax over tokens of MLP(LN x) * scale,  output = W x      MLP: D -> D/2 -> GELU -> K; scale: one number, learned

Place in the comparison: before blocks 4, 7 and 10 of 12, int(196 * rate^i) tokens, CLS apart. Here alone: after half the depth;
K and the positions are a part of the weights. No sizes are passed on. The authors train the whole model and distil it from the
full one; here the model is frozen (docs/learned-selector.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.methods.cut_modules import ONE_CUT, FixedCuts, mixture
from tokensieve.methods.places import powers_of_share
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision


class Slimming(nn.Module):
    """The network of one cut. (B, N, D) -> W (B, K, N)."""

    def __init__(self, width: int, keep: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width // 2)
        self.out = nn.Linear(width // 2, keep, bias=False)  # a bias would be the same for all tokens
        self.scale = nn.Parameter(torch.ones(1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(F.gelu(self.hidden(self.norm(x)))) * self.scale  # (B, N, K)
        return logits.softmax(1).transpose(1, 2)


class Slimmings(FixedCuts):
    """The networks of all cuts."""

    def __init__(self, width: int, cuts: Mapping[str, int] = ONE_CUT) -> None:
        super().__init__(width, cuts, Slimming)


@method(
    summary="a small network says how much every token goes into each output token (--weights)",
    paper='Zong et al., "Self-slimmed Vision Transformer", ECCV, 2022, arXiv:2111.12624',
    selects=False,
    mixes=True,
    part=Slimmings,
    count=powers_of_share,
    recipe="tokensieve train configs/sit.yaml",
)
@full_precision
def sit(view: View, keep: int) -> Reduction:
    """Means of all tokens, by learned weights."""
    return mixture(view, view.part(view))
