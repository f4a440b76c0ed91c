"""Mean cosine: tokens that are least like the others are kept, at a cost that is linear in their number.

From a public branch of vLLM for image pruning (Apache-2.0). Written from its rule.

    u_i = x_i / ||x_i||                 in float32
    r_i = u_i . sum_j u_j               the same order as the mean cosine to all tokens, without the N x N matrix
    the N - keep largest r are dropped

Place: on the embeddings that the language model reads (@llm.0). keep = max(1, N - ceil(q N)) for a dropped share q. Positions
stay the original ones.
"""

from __future__ import annotations

import torch.nn.functional as F

from tokensieve.core import Reduction, View
from tokensieve.methods.places import floored_share
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, top


@method(
    summary="the tokens that are least like all others, by one sum of unit vectors",
    paper="vLLM, a branch for image pruning, 2026",
    budget=lambda options: "50%",
    count=floored_share,
    where=lambda depth, decoder: "llm.0" if decoder else "out",
)
@full_precision
def cosine(view: View, keep: int) -> Reduction:
    """The tokens with the smallest mean cosine."""
    unit = F.normalize(view.tokens.float(), dim=-1)  # (B, N, D)
    scores = -(unit * unit.sum(1, keepdim=True)).sum(-1)  # (B, N)
    return Reduction.keep(top(scores, keep), view.n, scores=scores)
