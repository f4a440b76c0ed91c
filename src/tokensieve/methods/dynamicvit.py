"""DynamicViT: at several depths a small network predicts, for each token, the probability that it is worth keeping.

Rao et al., "DynamicViT: Efficient Vision Transformers with Dynamic Token Sparsification", NeurIPS 2021, arXiv:2106.02034.
Written from the formulas; the released code is MIT.

    h = GELU(Linear(LN x));  z = [first half of h, mean over tokens of its second half]
    log p = log_softmax(MLP(z)), MLP: D -> D/2 -> D/4 -> 2 with GELU;  the tokens with the largest log p(keep) stay

Place and budget there: before blocks 4, 7 and 10 of 12 (@3,6,9), int(196 * rate^i) tokens without CLS, rate = 0.7. Every
position has a network of its own, and the weights know the positions they were trained for; the budget is free. The mean runs
over the tokens that are still there.

The authors train the whole model with Gumbel-softmax masks, a loss on the ratio, and a teacher. Here the model is frozen, the
number is fixed and the choice hard (docs/learned-selector.md), with p(keep) as the straight-through gate of a kept token and
Gumbel noise on the ranking (`exploration`) in the place of sampling. Kept tokens are in raster order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.methods.cut_modules import ONE_CUT, CutModules
from tokensieve.methods.places import after_quarters, powers_of_share
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, top


class Predictor(nn.Module):
    """The network of one cut. (B, N, D) -> log p(keep) (B, N)."""

    def __init__(self, width: int, keep: int) -> None:
        super().__init__()
        self.norm, self.token = nn.LayerNorm(width), nn.Linear(width, width)
        self.hidden, self.narrow = nn.Linear(width, width // 2), nn.Linear(width // 2, width // 4)
        self.out = nn.Linear(width // 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        local, context = F.gelu(self.token(self.norm(x))).tensor_split([x.shape[2] // 2], dim=2)
        z = torch.cat([local, context.mean(1, keepdim=True).expand_as(context)], dim=-1)
        logits: Tensor = self.out(F.gelu(self.narrow(F.gelu(self.hidden(z)))))
        return logits.log_softmax(-1)[..., 0]


class Predictors(CutModules):
    """The networks of all cuts."""

    def __init__(self, width: int, cuts: Mapping[str, int] = ONE_CUT) -> None:
        super().__init__(width, cuts, Predictor)
        self.exploration = 0.0  # scale of the noise on the ranking, in training only


@method(
    summary="a small network at each depth predicts which tokens are worth keeping (--weights)",
    paper='Rao et al., "DynamicViT", NeurIPS, 2021, arXiv:2106.02034',
    part=Predictors,
    budget=lambda options: "70%",
    where=after_quarters,
    count=powers_of_share,
    recipe="tokensieve train configs/dynamicvit.yaml",
)
@full_precision
def dynamicvit(view: View, keep: int) -> Reduction:
    """The tokens with the largest probability of being kept."""
    part: Predictors = view.part
    scores: Tensor = part(view)
    if not (part.training and torch.is_grad_enabled()):
        return Reduction.keep(top(scores, keep), view.n, scores=scores)
    gumbel = -(-view.noise().clamp(1e-6, 1 - 1e-6).log()).log()
    chosen = top(scores.detach() + part.exploration * gumbel, keep)
    kept = scores.gather(1, chosen).exp()  # (B, K)
    return Reduction.keep(chosen, view.n, scores=scores, gate=1 + (kept - kept.detach()))
