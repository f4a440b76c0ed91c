"""A small trained network scores the tokens; the best go on.

Its heart is an attention of its own: the CLS token (without one: the mean token) asks, the tokens answer, a softmax for each
head, the mean over heads. So it can tell what the model will look at after the cut, from what is there before it. To the
logarithm of that comes what a small MLP makes of the token, of how much CLS attends to it and of how similar the two are.

In training the choice is hard as well, and straight-through: a chosen token's gate is 1 forward and backward it is the
logarithm of its share in the softmax of all scores, so that the loss can ask for more of one token and less of the others.
A little Gumbel noise on the ranking (`exploration`) lets tokens in that would not have been seen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.scoring import cosine, full_precision, top

HIDDEN, HEADS = 128, 4


class Scorer(nn.Module):
    """(B, N, D) tokens and what is known of them -> (B, N) scores, logarithms of shares."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.settings = {"width": width}  # what builds it again
        self.norm = nn.LayerNorm(width)
        self.ask = nn.Linear(width, HIDDEN)
        self.answer = nn.Linear(width, HIDDEN, bias=False)  # a bias would be the same for all tokens
        self.token = nn.Linear(width, HIDDEN)
        self.cues = nn.Linear(2, HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, 1, bias=False)
        self.exploration = 0.0  # scale of the noise on the ranking, in training only

    @full_precision
    def forward(self, view: View) -> Tensor:
        tokens = view.tokens.float()
        has_cls = view.attention is not None and view.attention.has_cls and view.prefix.shape[1] > 0  # else: registers
        summary = view.prefix[:, :1].float() if has_cls else tokens.mean(1, keepdim=True)  # (B, 1, D)
        normed = self.norm(tokens)
        q, k = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (self.ask(self.norm(summary)), self.answer(normed)))
        logits = (q @ k.transpose(-1, -2))[:, :, 0] * q.shape[-1] ** -0.5  # (B, H, N)
        shares = logits.log_softmax(-1).logsumexp(1)  # (B, N)
        heard = (view.coarse().float() * view.n).clamp_min(1e-6).log()  # (B, N), 0 where all are heard alike
        cues = torch.stack([heard, cosine(tokens, summary)[..., 0]], dim=-1)  # (B, N, 2)
        return (shares + self.out(F.gelu(self.token(normed) + self.cues(cues)))[..., 0]).log_softmax(-1)


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
    share = scores.gather(1, chosen)  # (B, K)
    return Reduction.keep(chosen, view.n, scores=scores, gate=1 + (share - share.detach()))
