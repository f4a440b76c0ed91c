"""Farthest-point sampling: seeds that cover a set of tokens, and the seed that each token is most similar to.

Distances are Euclidean, in float32, between tokens whose norms are clipped: some towers have a few tokens of many times the
usual norm, which would take the first seeds and stretch every distance. The first seed is the token farthest from the mean
token (or a given one), each next one the token farthest from all seeds so far. Ties go to the earlier token.

With up to MAX_GRAM tokens everything is read off one Gram matrix (B, N, N). With more, seeds are found in rounds among the
farthest candidates, which gives the same seeds with memory that is linear in N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.methods.choose_apart import choose_apart

MAX_GRAM = 2048  # tokens up to which the Gram matrix is stored
CANDIDATES = 64  # of a round, beyond MAX_GRAM
ROUNDING = 1e-6  # relative error of a squared distance
ROWS = 1024  # tokens compared with all seeds at a time, beyond MAX_GRAM


def farthest_points(tokens: Tensor, k: int, clip: float, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Seeds and groups of tokens (B, N, D).

    Args:
        k: how many seeds.
        clip: norms are clipped at so many times the image's median norm before distances are measured.
        first: (B,), the first seed of each image; None: the token farthest from the mean.

    Returns:
        index: (B, K), the seeds in ascending order.
        groups: (B, N), for each token the number of its most similar seed (cosine of the tokens). A seed is its own.
    """
    with torch.autocast(tokens.device.type, enabled=False):  # products in half precision would choose other seeds
        x = tokens.float()
        if tokens.shape[1] <= MAX_GRAM:
            return _from_gram(x, k, clip, first)
        starts = [None] * len(x) if first is None else first.tolist()
        pairs = [_in_rounds(image, k, clip, start) for image, start in zip(x, starts, strict=True)]
    return torch.stack([index for index, _ in pairs]), torch.stack([groups for _, groups in pairs])


def _from_gram(x: Tensor, k: int, clip: float, first: Tensor | None) -> tuple[Tensor, Tensor]:
    gram = x @ x.transpose(1, 2)  # (B, N, N)
    scale = clip_factor(gram.diagonal(dim1=1, dim2=2).sqrt(), clip)  # (B, N)
    gram = gram * scale[:, :, None] * scale[:, None]  # of the clipped tokens
    square = gram.diagonal(dim1=1, dim2=2).contiguous()  # (B, N), squared norms
    distance = torch.add(square[:, :, None], gram, alpha=-2).add_(square[:, None]).clamp_min_(0)  # (B, N, N), squared
    # a seed is never taken again, also among equal tokens
    distance = distance.masked_fill_(torch.eye(x.shape[1], dtype=torch.bool, device=x.device), -1.0)
    # (B,); without a given one by the squared distance to the mean, but for a constant
    seed = (square - 2 * gram.mean(2)).argmax(1) if first is None else first
    index = choose_apart(distance, seed, k).sort(dim=1).values  # (B, K)
    to_seeds = gram.gather(1, index[..., None].expand(-1, -1, x.shape[1]))  # (B, K, N)
    length = square.gather(1, index).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    # The norm of the token itself does not change which seed is most similar.
    return index, _join_themselves((to_seeds / length[..., None]).argmax(1), index)


def _in_rounds(x: Tensor, k: int, clip: float, first: int | None) -> tuple[Tensor, Tensor]:
    """Of one image, (N, D). Distances to the seeds only shrink: a candidate that is still farther than every token outside of
    the candidates was before the round is the farthest of all, so that one round finds several seeds."""
    norm = x.norm(dim=-1)
    z = x * clip_factor(norm, clip)[:, None]
    z = z - z.mean(0)
    square = z.square().sum(-1)  # (N,)
    seeds = [int(square.argmax()) if first is None else first]
    nearest = _squared_distance(square, square[seeds[0]], z @ z[seeds[0]])  # (N,)
    nearest[seeds[0]] = -1.0
    while len(seeds) < k:
        order = nearest.sort(descending=True, stable=True).indices[: CANDIDATES + 1]
        outside = float(nearest[order[-1]]) if len(order) > CANDIDATES else -2.0
        candidates = order[:CANDIDATES].sort().values
        among = z[candidates]
        distance = _squared_distance(square[candidates, None], square[candidates], among @ among.T)  # (C, C)
        left, found = nearest[candidates], list[int]()
        while len(seeds) + len(found) < k:
            best = int(left.argmax())
            if found and float(left[best]) <= outside:
                break
            found.append(best)
            left = torch.minimum(left, distance[best])
            left[found] = -1.0
        new = candidates[found]
        for rows in torch.arange(len(z), device=z.device).split(ROWS):
            apart = _squared_distance(square[rows, None], square[new], z[rows] @ z[new].T)  # (R, S)
            nearest[rows] = torch.minimum(nearest[rows], apart.amin(1))
        seeds += new.tolist()
        nearest[new] = -1.0
    index = torch.tensor(sorted(seeds), device=x.device)
    directions = torch.nn.functional.normalize(x[index], dim=-1)
    groups = torch.cat([(rows @ directions.T).argmax(1) for rows in x.split(ROWS)])
    return index, _join_themselves(groups[None], index[None])[0]


def _squared_distance(one: Tensor, other: Tensor, product: Tensor) -> Tensor:
    """From squared norms and products. What is below their rounding error is 0, so that equal tokens are tied."""
    both = one + other
    distance = both - 2 * product
    return torch.where(distance > ROUNDING * both, distance, torch.zeros_like(distance))


def clip_factor(norm: Tensor, clip: float, among: Tensor | None = None) -> Tensor:
    """What norms (..., N) are multiplied with, so that none exceeds `clip` times their median (where that is not 0).

    among: (..., N), the tokens whose median it is; None: all.
    """
    counted = norm if among is None else norm.masked_fill(~among, torch.nan)
    median = counted.nanmedian(dim=-1, keepdim=True).values
    limit = torch.where(median > 0, clip * median, torch.inf)
    return (limit / norm.clamp_min(torch.finfo(torch.float32).tiny)).clamp_max(1.0)


def _join_themselves(groups: Tensor, index: Tensor) -> Tensor:
    """Groups (B, N) in which each seed, index (B, K), is in its own."""
    return groups.scatter(1, index, torch.arange(index.shape[1], device=index.device).expand_as(index))
