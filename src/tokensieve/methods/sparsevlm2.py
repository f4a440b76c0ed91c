"""SparseVLM 2.0: as SparseVLM, but attention is freed of what rotary positions alone give, and only some heads rate.

Zhang et al., "SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference", ICML 2025,
arXiv:2410.04417. Version 2.0 ("SparseVLM+"), written from the formulas; the released code is Apache-2.0.

    raters: as in `sparsevlm`
    b_tv = rot(1)_t . rot(1)_v / sqrt(d): the logit of word t and token v if every entry of the query and the key were 1
    a_htv = attention of head h from rater t to v, of the layer that just ran, after the softmax, divided by b_tv
    the 14 heads with the largest sum of a over raters and vision tokens rate; P_v = mean of a over these heads and the raters
    the n_l tokens with the largest P_v are kept; nothing is recycled

Place: behind layers 2, 6 and 15 of 32 (from 0), with n_l by the option `tokens`: 192 is 300, 200, 118 of 576 tokens, 128 is
238, 108, 60; 96 is 246, 54, 28; 64 is 66, 34, 20; other numbers of tokens in proportion. A budget in the plan replaces them.
Positions stay the original ones, as released. b is a sum of cosines, so it may be negative or near 0 for tokens far apart:
then P_v is of the other sign, or large, as in the released code; here b is at least 1e-6 away from 0. A model with fewer
heads than the option `heads` uses all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from tokensieve.core import Reduction, Rotary, View
from tokensieve.errors import UserError
from tokensieve.methods.raters import find_raters
from tokensieve.methods.registry import method
from tokensieve.methods.sparsevlm import count_by, places
from tokensieve.scoring import full_precision, top

TABLES = {"192": (300, 200, 118), "128": (238, 108, 60), "96": (246, 54, 28), "64": (66, 34, 20)}
SMALLEST = 1e-6  # of |b|


def check(options: Mapping[str, Any]) -> None:
    if options["heads"] < 1:
        raise UserError(f"sparsevlm2: heads={options['heads']} leaves no head to rate tokens; use heads=14, or at least 1")


@method(
    summary="sparsevlm 2.0: attention of the best heads without the share of rotary positions, no recycling",
    paper='Zhang et al., "SparseVLM", ICML, 2025, arXiv:2410.04417',
    needs=("attention", "question", "inputs", "rotary"),
    check=check,
    budget=lambda options: "100%",
    where=places,
    count=count_by(TABLES),
    attention="previous",
)
@full_precision
def sparsevlm2(view: View, keep: int, *, tokens: Literal["192", "128", "96", "64"] = "192", heads: int = 14) -> Reduction:
    """The tokens that relevant words attend to most in the heads that see most of the image, corrected for positions."""
    assert view.attention is not None and view.rotary is not None
    raters = find_raters(view)  # (B, T)
    rows = view.attention.text_heads() / position_logits(view.rotary)[:, None]  # (B, H, T, N)
    rated = (rows * raters[:, None, :, None]).sum(2)  # (B, H, N)
    best = top(rated.sum(2), min(heads, rated.shape[1]))  # (B, h)
    chosen = rated.gather(1, best[..., None].expand(-1, -1, view.n))
    scores = chosen.mean(1) / raters.sum(1, keepdim=True).clamp_min(1)  # (B, N)
    return Reduction.keep(top(scores, keep), view.n, scores=scores)


def position_logits(rotary: Rotary) -> Tensor:
    """The logit of each word and vision token by their positions alone, away from 0: (B, T, N)."""
    words, vision = (turned_ones(*tables) for tables in (rotary.question, rotary.tokens))
    logits = words @ vision.transpose(1, 2) * words.shape[-1] ** -0.5
    return torch.where(logits < 0, logits.clamp_max(-SMALLEST), logits.clamp_min(SMALLEST))


def turned_ones(cos: Tensor, sin: Tensor) -> Tensor:
    """A query or key of ones after rotation: (B, L, d)."""
    signs = torch.ones(cos.shape[-1], device=cos.device)
    signs[: len(signs) // 2] = -1.0
    return cos.float() + sin.float() * signs
