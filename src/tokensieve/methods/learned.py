"""A small trained network scores the tokens; those with the largest scores are kept.

The network has an attention of its own, from the CLS token (without one, the mean token) to the tokens, averaged over heads.
With it, the network can predict what the model attends to after the cut. The score is the logarithm of that attention, plus the
output of a small MLP that reads the token, the attention it gets from CLS, and its similarity to CLS.

In training the selection is hard too, with a straight-through gate: 1 in the forward pass, and in the backward pass the
logarithm of the token's share in the softmax of all scores. A little Gumbel noise on the ranking (`exploration`) selects tokens
that would not have been selected otherwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.methods.settings import check_count
from tokensieve.scoring import cosine, full_precision, top

HIDDEN, HEADS = 128, 4


class SelectionNetwork(nn.Module):
    """The network of the learned selector. Scores of the tokens, logarithms of shares: (B, N, D) -> (B, N)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        check_count("learned: width", width)
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
        attention = (view.coarse().float() * view.n).clamp_min(1e-6).log()  # (B, N), 0 if all get the same
        cues = torch.stack([attention, cosine(tokens, summary)[..., 0]], dim=-1)  # (B, N, 2)
        scores: Tensor = shares + self.out(F.gelu(self.token(normed) + self.cues(cues)))[..., 0]
        return scores.log_softmax(-1)


@method(
    summary="a small trained network scores the tokens (--weights)",
    needs=("attention",),
    part=SelectionNetwork,
    recipe="tokensieve train configs/learned_selector.yaml",
)
def learned(view: View, keep: int) -> Reduction:
    """The tokens with the largest scores of the trained SelectionNetwork."""
    scorer: SelectionNetwork = view.part
    scores = scorer(view)
    if not (scorer.training and torch.is_grad_enabled()):
        return Reduction.keep(top(scores, keep), view.n, scores=scores)
    gumbel = -(-view.noise().clamp(1e-6, 1 - 1e-6).log()).log()
    chosen = top(scores.detach() + scorer.exploration * gumbel, keep)
    share = scores.gather(1, chosen)  # (B, K)
    return Reduction.keep(chosen, view.n, scores=scores, gate=1 + (share - share.detach()))
