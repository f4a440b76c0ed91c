"""FastV: behind the first layers of the language model, the vision tokens that the last word attends to most are kept.

Chen et al., "An Image is Worth 1/2 Tokens After Layer 2", ECCV 2024, arXiv:2403.06764. Written from the formulas; the released
code has no licence.

    phi_i = mean over heads of the attention from the last token of the prompt to vision token i, in layer K - 1 (from 0)
    before layer K the round(N (1 - R)) largest are kept, in their order, with their positions; K = 2, R = 0.5

`fastv` is `fastv@llm.2:50%`. Attention is that of the layer that just ran (`attention=previous`); the paper's text speaks of
the attention received from all tokens, the code takes the last row. Budgets of the
authors are averages over layers: all tokens pass the first K layers. Layers behind the cut cache only the tokens that are
left.
"""

from __future__ import annotations

from tokensieve.core import Reduction, View
from tokensieve.methods.places import rounded_share
from tokensieve.methods.registry import method
from tokensieve.scoring import top


@method(
    summary="in the language model, the vision tokens that the last word attends to most",
    paper='Chen et al., "An Image is Worth 1/2 Tokens After Layer 2", ECCV, 2024, arXiv:2403.06764',
    needs=("attention",),
    budget=lambda options: "50%",
    count=rounded_share,
    where="llm.2",
    attention="previous",
)
def fastv(view: View, keep: int) -> Reduction:
    """The largest attention of the last row."""
    scores = view.coarse().float()
    return Reduction.keep(top(scores, keep), view.n, scores=scores)
