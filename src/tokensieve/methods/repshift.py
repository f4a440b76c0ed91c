"""Representation shift: tokens that the MLP of a block changes most are kept.

"Representation Shift: Unifying Token Compression with FlashAttention", ICCV 2025, arXiv:2508.00367. Written from its rule; no
licence file of the released code is known to us.

    s_i = ||F(x_i) - x_i||_2          F: the MLP branch of the block with its residual, so s_i is the norm of what the MLP adds

It needs no attention map, so it works with any attention kernel. Place: after a block; the paper tries several, here it is
after half the depth. The number of tokens is fixed by the plan and counts patches alone.
"""

from __future__ import annotations

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.scoring import top


@method(
    summary="the tokens that the block's MLP changes most",
    paper='"Representation Shift: Unifying Token Compression with FlashAttention", ICCV, 2025, arXiv:2508.00367',
    needs=("before",),
    budget=lambda options: "50%",
)
def repshift(view: View, keep: int) -> Reduction:
    """The largest changes by the MLP."""
    assert view.before is not None
    scores = (view.tokens.float() - view.before.float()).norm(dim=-1)  # (B, N)
    return Reduction.keep(top(scores, keep), view.n, scores=scores)
