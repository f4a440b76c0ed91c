"""A small trained network scores the tokens; the best go on.

It sees each token, the CLS token (without one: the mean token), how much CLS attends to the token and how similar the two
are, and the mean of what it makes of all tokens, so that a score can tell "more than the others". Scores begin as the
logarithm of the attention of CLS and learn what to change about it.

In training the choice is hard as well, and straight-through: a chosen token's gate is 1 forward and backward it is the
logarithm of its share in the softmax of all scores, so that the loss can ask for more of one token and less of the others.
A little Gumbel noise on the ranking (`exploration`) lets tokens in that would not have been seen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.methods import method
from tokensieve.scoring import cosine, full_precision, top

HIDDEN = 128


class Scorer(nn.Module):
    """(B, N, D) tokens and what is known of them -> (B, N) scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.token = nn.Linear(width, HIDDEN)
        self.summary = nn.Linear(width, HIDDEN, bias=False)
        self.cues = nn.Linear(2, HIDDEN, bias=False)
        self.mix = nn.Linear(2 * HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, 1, bias=False)  # all scores alike mean nothing
        self.exploration = 0.0  # scale of the noise on the ranking, in training only

    @full_precision
    def forward(self, view: View) -> Tensor:
        tokens = view.tokens.float()
        summary = view.prefix[:, :1].float() if view.prefix.shape[1] else tokens.mean(1, keepdim=True)  # (B, 1, D)
        heard = (view.coarse().float() * view.n).clamp_min(1e-6).log()  # (B, N), 0 where all are heard alike
        cues = torch.stack([heard, cosine(tokens, summary)[..., 0]], dim=-1)  # (B, N, 2)
        each = F.gelu(self.token(self.norm(tokens)) + self.summary(self.norm(summary)) + self.cues(cues))  # (B, N, H)
        among = each.mean(1, keepdim=True).expand_as(each)
        return heard + self.out(F.gelu(self.mix(torch.cat([each, among], dim=-1))))[..., 0]


@method(
    summary="a small trained network scores the tokens (--weights)",
    paper="tokensieve S3",
    needs=("attention",),
    part=Scorer,
)
def learned(view: View, keep: int) -> Reduction:
    """The tokens that the trained Scorer ranks highest."""
    scorer: Scorer = view.part
    scores = scorer(view)
    if not (scorer.training and torch.is_grad_enabled()):
        return Reduction.keep(top(scores, keep), view.n, scores=scores)
    gumbel = -(-view.noise().clamp(1e-6, 1 - 1e-6).log()).log()
    chosen = top(scores.detach() + scorer.exploration * gumbel, keep)
    share = scores.log_softmax(-1).gather(1, chosen)  # (B, K)
    return Reduction.keep(chosen, view.n, scores=scores, gate=1 + (share - share.detach()))
