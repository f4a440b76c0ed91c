"""K-medoids: tokens that stand in the middle of clusters are kept, the first ones by the attention they get.

The baseline of Haurum et al., "Which Tokens to Use? Investigating Token Reduction in Vision Transformers", ICCV Workshops
2023, arXiv:2308.04657. Written from the formulas; the released code is MIT.

    w_i = attention received, summed over heads and all rows, of the block before
    start: the K largest w;  3 times: each token joins its nearest medoid (Euclid), then each cluster takes as its medoid
    the member with the smallest w_i sum_j d_ij, j over all tokens (as released: not its members alone)

Place: on the input of blocks 4, 7 and 10 of 12, so after blocks 3, 6 and 9, with the rate 0.7 at each. A cluster without
members keeps its medoid; the released code takes token 0.
"""

from __future__ import annotations

import torch

from tokensieve.core import Reduction, View
from tokensieve.methods.places import after_quarters, powers_of_share
from tokensieve.methods.registry import method
from tokensieve.scoring import euclidean, full_precision, top

ITERATIONS = 3


@method(
    summary="tokens in the middle of clusters, which start at the most attended ones",
    paper='Haurum et al., "Which Tokens to Use?", ICCV Workshops, 2023, arXiv:2308.04657',
    needs=("attention",),
    budget=lambda options: "70%",
    where=after_quarters,
    count=powers_of_share,
)
@full_precision
def kmedoids(view: View, keep: int) -> Reduction:
    """Three rounds of clustering."""
    assert view.attention is not None
    received = view.attention.received()  # (B, N); a constant factor does not matter
    x = view.tokens.float()
    distance = euclidean(x, x)  # (B, N, N)
    cost = received * distance.sum(-1)  # (B, N)
    medoids = top(received, keep)
    cheapest = cost.sort(dim=1, stable=True).indices
    rank = cheapest.argsort(dim=1)  # (B, N), of equal costs the first token is before
    for _ in range(ITERATIONS):
        to_medoids = distance.gather(2, medoids[:, None].expand(-1, view.n, -1))  # (B, N, K)
        best = torch.full_like(medoids, view.n).scatter_reduce(1, to_medoids.argmin(-1), rank, "amin")  # (B, K)
        medoids = torch.where(best == view.n, medoids, cheapest.gather(1, best.clamp_max(view.n - 1)))
    return Reduction.keep(medoids, view.n, scores=received)
