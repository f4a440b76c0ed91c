"""ATC: tokens are merged by agglomerative clustering of their keys, until as many clusters are left as tokens are wanted.

Haurum et al., "Agglomerative Token Clustering", ECCV 2024, arXiv:2409.11923. Written from the formulas; the released code is
MIT.

    d_ij = 1 - cos of keys, mean over heads;   the two nearest clusters are joined again and again
    nearest: by their nearest members (single), their farthest members (complete) or the mean distance (average)
    size-weighted mean of each cluster

Place: between attention and MLP of blocks 4, 7 and 10 of 12 (3, 6 and 9 from 0). CLS is apart. The average is the authors'
choice for most rates. Later attention adds log(size), the option `sizes`. A cluster is represented by its first member.
Clusters are found on the CPU, by scipy, image by image.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.places import inside_quarters, powers_of_share
from tokensieve.methods.registry import method
from tokensieve.scoring import cosine, full_precision

Linkage = Literal["average", "single", "complete"]


@method(
    summary="agglomerative clustering of keys; each cluster becomes its mean",
    paper='Haurum et al., "Agglomerative Token Clustering", ECCV, 2024, arXiv:2409.11923',
    needs=("attention",),
    selects=False,
    norm=0.0,
    budget=lambda options: "70%",
    where=inside_quarters,
    count=powers_of_share,
    no_graph="it clusters with SciPy, outside of the graph",
)
@full_precision
def atc(view: View, keep: int, *, linkage: Linkage = "average") -> Reduction:
    """The clusters, in the order of their first members."""
    assert view.attention is not None
    keys = view.attention.keys()  # (B, N, d)
    distance = (1 - cosine(keys, keys)).detach().double().cpu()
    labels = torch.stack([_clusters(image, keep, linkage) for image in distance]).to(keys.device)  # (B, N), from 0
    position = torch.arange(view.n, device=keys.device).expand_as(labels)
    first = torch.full_like(labels[:, :keep], view.n).scatter_reduce(1, labels, position, "amin")  # (B, K)
    index, order = first.sort(1)
    return Reduction.merge(order.argsort(1).gather(1, labels), index, view.sizes_or_ones())


def _clusters(distance: Tensor, count: int, linkage: Linkage) -> Tensor:
    """The cluster of each token of one image, from a matrix of distances (N, N): (N,), numbers below `count`."""
    from scipy.cluster.hierarchy import linkage as join  # type: ignore[import-untyped]

    n = len(distance)
    if count >= n:
        return torch.arange(n)
    upper = torch.triu_indices(n, n, 1)
    tree = join(distance[upper[0], upper[1]].clamp_min(0).numpy(), linkage)
    parent = list(range(n))
    members: dict[int, list[int]] = {i: [i] for i in range(n)}
    for step, row in enumerate(tree[: n - count]):  # joins in the order of their distance
        members[n + step] = members.pop(int(row[0])) + members.pop(int(row[1]))
    for number, group in enumerate(members.values()):
        for token in group:
            parent[token] = number
    return torch.tensor(parent)
