"""DivPrune: the tokens that are as far from each other as possible, by cosine.

Alvar et al., "DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models", CVPR 2025, arXiv:2503.02175. Written
from the formulas; the released code is CC-BY-NC 4.0.

    D_ij = 1 - cos(v_i, v_j);  s_1 = argmax_i min_{j != i} D_ij;  s_{t+1} = argmax_i min over the chosen s of D_is

Place: on the embeddings that the language model reads (@llm.0), round(0.098 N) tokens. Kept tokens are in their order. Of equal
distances the first token wins. Time is O(K N), memory linear in N.
"""

from __future__ import annotations

from tokensieve.core import Reduction, View
from tokensieve.methods.max_min import loneliest, most_diverse
from tokensieve.methods.places import rounded_share
from tokensieve.methods.registry import method


@method(
    summary="the tokens that are as far from each other as possible",
    paper='Alvar et al., "DivPrune: Diversity-based Visual Token Pruning", CVPR, 2025, arXiv:2503.02175',
    budget=lambda options: "9.8%",
    count=rounded_share,
    where=lambda depth, decoder: "llm.0" if decoder else "out",
)
def divprune(view: View, keep: int) -> Reduction:
    """Farthest points by cosine."""
    return Reduction.keep(most_diverse(view.tokens, keep, loneliest(view.tokens)), view.n)
