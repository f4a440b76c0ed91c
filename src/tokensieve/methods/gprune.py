"""G-Prune: information flows along a graph of similar tokens; those that gather most of it are kept.

Jiang et al., "What Kind of Visual Tokens Do We Need? Training-free Visual Token Pruning for Multi-modal Large Language Models
from the Perspective of Graph", AAAI 2025, arXiv:2501.02268. Written from the formulas; no licence file of the released code is
known to us.

    edges: cos(x_i, x_j) >= 0.5, each token with itself too
    A = softmax over the edges of a row of cos / 0.03
    s = (norms of x) A^5, each divided by the number of edges of its token
    the int(ratio N) largest are kept

Place: on the embeddings that the language model reads (@llm.0). The budget counts vision tokens.
"""

from __future__ import annotations

import torch

from tokensieve.core import Reduction, View
from tokensieve.methods.places import floored_share
from tokensieve.methods.registry import method
from tokensieve.scoring import cosine, full_precision, top

EDGE, TEMPERATURE, STEPS = 0.5, 0.03, 5


@method(
    summary="tokens that gather most information along a graph of similar tokens",
    paper='Jiang et al., "What Kind of Visual Tokens Do We Need?", AAAI, 2025, arXiv:2501.02268',
    budget=lambda options: "25%",
    count=floored_share,
    where=lambda depth, decoder: "llm.0" if decoder else "out",
)
@full_precision
def gprune(view: View, keep: int) -> Reduction:
    """The largest scores after five steps along the graph."""
    x = view.tokens.float()
    similar = cosine(x, x)  # (B, N, N)
    edges = (similar >= EDGE) | torch.eye(view.n, dtype=torch.bool, device=x.device)
    flow = (similar / TEMPERATURE).masked_fill(~edges, -torch.inf).softmax(-1)
    scores = x.norm(dim=-1)[:, None]  # (B, 1, N)
    for _ in range(STEPS):
        scores = scores @ flow
    scores = scores[:, 0] / edges.sum(-1)  # (B, N)
    return Reduction.keep(top(scores, keep), view.n, scores=scores)
