"""TRIM: tokens that CLIP finds least similar to the question are kept, since dense CLIP similarities are inverted.

Song et al., "Less is More: A Simple yet Effective Token Reduction Method for Efficient Multi-modal LLMs", COLING 2025,
arXiv:2409.10994. Written from the formulas; the released code is Apache-2.0 by its README.

    s = softmax over the tokens of -e_i . t        e: tokens, t: text in CLIP's space, not normalised; note the minus
    keep the int(N k) largest, or with `automatic` those above Q3 + 1.5 (Q3 - Q1)
    the mean of the others is one more token

Place: at the tower's output. With `automatic` the number of tokens is the image's own, one where none is an outlier, and the
budget is the most. The text is what the caller gives (context={"text": ...}), mean over its segments; in a language model
without it, the question's embeddings and the tokens as the model reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.joining import with_mean_of_rest
from tokensieve.methods.outliers import above_quartiles
from tokensieve.methods.places import floored_share
from tokensieve.methods.registry import method
from tokensieve.methods.text_space import text_space
from tokensieve.scoring import full_precision, top


@method(
    summary="tokens that CLIP finds least similar to the text, and the mean of the others",
    paper='Song et al., "Less is More", COLING, 2025, arXiv:2409.10994',
    needs=("text",),
    selects=False,
    adaptive=True,
    budget=lambda options: "25%",
    count=floored_share,
    where=lambda depth, decoder: "llm.0" if decoder else "out",
    extra=1,
)
@full_precision
def trim(view: View, keep: int, *, automatic: bool = False) -> Reduction:
    """The chosen tokens in raster order, then the mean of the others."""
    space = text_space(view, "trim")
    scores = (-(space.image @ space.mean_text()[..., None])[..., 0]).softmax(-1)  # (B, N)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, top(scores, keep), True)
    if automatic:
        best = torch.zeros_like(chosen).scatter(1, scores.argmax(1, keepdim=True), True)  # at least one
        chosen = chosen & (above_quartiles(scores) | best)
    return Reduction.stack([_with_mean(chosen[b], scores[b : b + 1]) for b in range(len(scores))])


def _with_mean(chosen: Tensor, scores: Tensor) -> Reduction:
    """Of one image: the chosen tokens (N,), and the mean of the others, if there are any."""
    index, left = chosen.nonzero()[:, 0], int((~chosen).sum())
    if not left:
        return Reduction.keep(index[None], len(chosen), scores=scores)
    return with_mean_of_rest(index[None], torch.full_like(scores, 1 / left), scores)
