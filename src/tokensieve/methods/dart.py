"""DART: tokens that are least like a few pivots are kept, since duplicates matter more than importance.

Wen et al., "Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters More", EMNLP 2025,
arXiv:2502.11494. Written from the formulas; the released code is Apache-2.0.

    pivots: the 4 vision tokens and the 4 words behind the image with the largest L1 norm of their keys (layer K - 1, after
    rotation, all heads together);  q = budget // 8
    for each pivot in turn: of the vision tokens that are left, the q with the lowest cosine to it; states after the final norm
    kept: the vision pivots and all picks

Place: before layer 2 of the language model. Of a budget of B the authors keep 4 + 8 (B // 8) tokens; here it is exactly the
budget: the picks of all pivots together fill it, the first pivots pick one more where it is not divisible. Pivots come in the
order of their norms (the released code: that of a Python set). Positions stay the original ones. In a tower, without words, the
pivots are patches alone and the states are the tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, gather_rows, positions

PIVOTS = 4  # of the image, and as many of the text


@method(
    summary="in the language model, the tokens least like a few pivots of image and text",
    paper='Wen et al., "Stop Looking for Important Tokens in Multimodal Language Models", EMNLP, 2025, arXiv:2502.11494',
    needs=("attention", "question"),
    budget=lambda options: "25%",
    where="llm.2",
    attention="previous",
)
@full_precision
def dart(view: View, keep: int) -> Reduction:
    """The pivots of the image, and the tokens least like any of the pivots in turn."""
    assert view.attention is not None
    norm = view.final_norm or (lambda x: x)
    keys = view.attention.k[:, :, view.attention.prefix :].float().abs().sum((1, 3))  # (B, N)
    count = min(PIVOTS, keep)
    own = keys.argsort(dim=1, descending=True, stable=True)[:, :count]  # (B, P)
    states = F.normalize(norm(view.tokens).float(), dim=-1)
    pivots = gather_rows(states, own)  # (B, P, D)
    words, there = _text_pivots(view, norm)
    pivots = torch.cat([pivots, words], dim=1)
    valid = torch.cat([torch.ones_like(own, dtype=torch.bool), there], dim=1)  # (B, P + T)
    taken = torch.zeros_like(keys, dtype=torch.bool).scatter(1, own, True)
    quotas = _quotas(valid, keep - count)
    for number in range(pivots.shape[1]):
        similar = (states * pivots[:, number : number + 1]).sum(-1)  # (B, N)
        rank = similar.masked_fill(taken, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
        taken = taken | (rank < quotas[:, number : number + 1])
    index = positions(taken, keep)
    return Reduction.keep(index, view.n, scores=keys)


def _text_pivots(view: View, norm: object) -> tuple[Tensor, Tensor]:
    """The words with the largest keys behind the image: unit states (B, T, D), and which of them are there (B, T)."""
    assert view.attention is not None
    if view.attention.text is None or view.question is None or not callable(norm):
        return view.tokens[:, :0].float(), torch.zeros_like(view.tokens[:, :0, 0], dtype=torch.bool)
    text = view.attention.question_rows()
    real = text.mask & text.follows
    size = text.k.float().abs().sum((1, 3)).masked_fill(~real, -1.0)  # (B, T)
    best = size.argsort(dim=1, descending=True, stable=True)[:, :PIVOTS]
    states = F.normalize(norm(gather_rows(view.question.tokens, best)).float(), dim=-1)
    return states, real.gather(1, best)


def _quotas(valid: Tensor, total: int) -> Tensor:
    """How many tokens each pivot (B, P) picks, `total` in all: the first ones one more."""
    number = valid.long().cumsum(1) - 1  # of each among those that are there
    count = valid.sum(1, keepdim=True)
    every = torch.full_like(count, total)
    return torch.where(valid, every // count + (number < every % count).long(), 0)
