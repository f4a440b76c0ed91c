"""Density peaks over nearest neighbours (DPC-KNN): dense tokens far from any denser token become the centres of clusters.

Du et al., "Study on density peaks clustering based on k-nearest neighbors and principal component analysis", Knowledge-Based
Systems, 2016; as used for tokens by TCFormer (arXiv:2204.08680).

    d_ij = |x_i - x_j| / sqrt(C)
    rho_i = exp(-(1/k) sum of d_ij^2 over the k nearest j)             the token itself is one of the k
    delta_i = min of d_ij over the j with rho_j > rho_i                for the densest token: the largest distance of the image
    centres = the tokens with the largest rho * delta; every token belongs to its nearest centre, a centre to itself

The released code adds noise to rho against ties; here, of equal densities the earlier token counts as denser.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.scoring import euclidean, full_precision

MAX_ENTRIES = 1 << 22  # distances of an image in memory at a time


@full_precision
def density_peaks(x: Tensor, clusters: int, k: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Centres and clusters of the tokens x (B, N, C).

    Args:
        clusters: how many.
        k: the nearest neighbours that make the density, the token itself included.
        mask: (B, N), False: padding, which is no neighbour and no centre. At least `clusters` tokens of an image are real.

    Returns:
        centres: (B, clusters), by falling rho * delta.
        labels: (B, N), for each token the number of its centre; what padding gets has no meaning.
    """
    rho, delta = density_and_gap(x, k, mask)
    score = rho * delta if mask is None else (rho * delta).masked_fill(~mask, -1.0)
    centres = score.sort(dim=-1, descending=True, stable=True).indices[:, :clusters]
    seeds = x.float().gather(1, centres[..., None].expand(-1, -1, x.shape[2]))
    blocks = x.float().split(max(1, MAX_ENTRIES // clusters), dim=1)
    labels = torch.cat([_distances(rows, seeds).argmin(-1) for rows in blocks], dim=1)  # (B, N)
    return centres, labels.scatter(1, centres, torch.arange(clusters, device=x.device).expand_as(centres))


@full_precision
def density_and_gap(x: Tensor, k: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """rho and delta of each token, (B, N) each. Distances are made in blocks of rows."""
    x, n = x.float(), x.shape[1]
    far = None if mask is None else ~mask[:, None]  # (B, 1, N)
    rows = max(1, MAX_ENTRIES // n)

    blocks = [slice(start, start + rows) for start in range(0, n, rows)]
    known: dict[int, Tensor] = {}  # the distances, if one block has all of them
    density, largest = [], []
    for block in blocks:
        distance = _distances(x[:, block], x)  # (B, R, N)
        if len(blocks) == 1:
            known[block.start] = distance
        near = distance if far is None else distance.masked_fill(far, torch.inf)
        squares = near.topk(min(k, n), dim=-1, largest=False).values.square()  # inf: fewer than k tokens are real
        density.append((-squares.masked_fill(squares.isinf(), 0.0).sum(-1) / min(k, n)).exp())
        largest.append((distance if far is None else distance.masked_fill(far, 0.0)).amax(-1))
    rho = torch.cat(density, dim=1)
    farthest = torch.cat(largest, dim=1)
    if mask is not None:
        rho, farthest = rho.masked_fill(~mask, -1.0), farthest.masked_fill(~mask, 0.0)
    order = torch.arange(n, device=x.device)
    gaps = []
    for block in blocks:
        mine = rho[:, block, None]
        denser = (rho[:, None] > mine) | ((rho[:, None] == mine) & (order < order[block, None]))  # (B, R, N)
        distance = known[block.start] if known else _distances(x[:, block], x)
        gaps.append(distance.masked_fill(~denser, torch.inf).amin(-1))
    delta = torch.cat(gaps, dim=1)
    return rho, torch.where(delta.isinf(), farthest.amax(-1, keepdim=True), delta)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean distances / sqrt(C): (B, R, C), (B, N, C) -> (B, R, N)."""
    return euclidean(x, y) / float(x.shape[2] ** 0.5)
