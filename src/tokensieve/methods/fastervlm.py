"""FasterVLM: the patches that CLS attends to most, at the tower's output.

Zhang et al., "[CLS] Attention is All You Need for Training-Free Visual Token Pruning: Make VLM Inference Faster",
arXiv:2412.01818. Written from the formulas; the released code is Apache-2.0. It is the first half of `vispruner` alone.

    a_i = mean over heads of the attention from CLS to patch i, of the last block but one;  the T largest are kept, in their
        order

Place: at the tower's output, before the projector. T counts patches. Without a CLS token, the attention received. Positions
are numbered anew by the authors; here tokens keep theirs.
"""

from __future__ import annotations

from tokensieve.core import Reduction, View
from tokensieve.methods.attention_rows import global_attention
from tokensieve.methods.registry import method
from tokensieve.scoring import top


@method(
    summary="at the tower's output, the patches that CLS attends to most",
    paper='Zhang et al., "[CLS] Attention is All You Need for Training-Free Visual Token Pruning", 2024, arXiv:2412.01818',
    needs=("attention",),
    budget=lambda options: "25%",
    where="out",
)
def fastervlm(view: View, keep: int) -> Reduction:
    """The largest attention."""
    scores = global_attention(view)
    return Reduction.keep(top(scores, keep), view.n, scores=scores)
