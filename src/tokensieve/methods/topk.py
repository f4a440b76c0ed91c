"""Top-K: the patches that CLS attends to most are kept, the others are dropped.

The baseline of Haurum et al., "Which Tokens to Use? Investigating Token Reduction in Vision Transformers", ICCV Workshops 2023,
arXiv:2308.04657: `evit` without its extra token; the released code is MIT. It is a strong one. Place and rate as in `evit`.
"""

from __future__ import annotations

from tokensieve.core import Reduction, View
from tokensieve.methods.places import inside_quarters
from tokensieve.methods.registry import method
from tokensieve.scoring import top


@method(
    summary="the patches that CLS attends to most",
    paper='Haurum et al., "Which Tokens to Use?", ICCV Workshops, 2023, arXiv:2308.04657',
    needs=("attention",),
    budget=lambda options: "70%",
    where=inside_quarters,
)
def topk(view: View, keep: int) -> Reduction:
    """The largest attention."""
    scores = view.coarse().float()
    return Reduction.keep(top(scores, keep), view.n, scores=scores)
