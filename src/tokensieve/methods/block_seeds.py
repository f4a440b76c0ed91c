"""Seeds far apart for long videos: farthest-point sampling in blocks of places, each through all of its time.

What repeats in a video repeats at its place, so a block holds some neighbouring places of all frames. Every block is sampled by
itself (`farthest_points.py`), beyond its share of the seeds. The distance of a seed from those before it in its block says how
much it is needed; of all blocks together the seeds with the largest distances are taken. Blocks have a bounded number of
tokens, so time and memory are linear in those of the video.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokensieve.core import View
from tokensieve.methods.choose_apart import choose_apart
from tokensieve.methods.controls import cells
from tokensieve.methods.farthest_points import clip_factor
from tokensieve.scoring import full_precision

BLOCK = 1024  # tokens of a block
RESERVE = 4  # seeds that a block is sampled for, times its share


@full_precision
def block_seeds(view: View, keep: int, clip: float) -> tuple[Tensor, Tensor]:
    """Seeds (B, K) in ascending order, and for each token the number of its most similar seed in its block, (B, N)."""
    x = view.tokens.float()
    x = x * clip_factor(x.norm(dim=-1), clip)[..., None]
    blocks = find_blocks(view, keep)
    sampled = [_sample(x[:, block], min(len(block), RESERVE * math.ceil(keep * len(block) / view.n))) for block in blocks]
    radii = torch.cat([radius for _, radius, _ in sampled], dim=1)  # (B, S)
    best = radii.argsort(dim=1, descending=True, stable=True)[:, :keep]
    taken = torch.zeros_like(radii, dtype=torch.bool).scatter(1, best, True)
    tokens = torch.cat([block[order] for block, (order, _, _) in zip(blocks, sampled, strict=True)], dim=1)  # (B, S)
    index = tokens.masked_fill(~taken, view.n).sort(dim=1).values[:, :keep]
    number = torch.searchsorted(index, tokens)  # (B, S), of the seeds that are taken
    groups, done = torch.zeros_like(index[:, :1]).repeat(1, view.n), 0
    for block, (order, _, likeness) in zip(blocks, sampled, strict=True):
        mine = slice(done, done + order.shape[1])
        nearest = likeness.masked_fill(~taken[:, mine, None], -torch.inf).argmax(1)  # (B, n)
        groups[:, block] = number[:, mine].gather(1, nearest)
        done += order.shape[1]
    return index, groups.scatter(1, index, torch.arange(keep, device=index.device).expand_as(index))


def find_blocks(view: View, keep: int) -> list[Tensor]:
    """The tokens of each block. Where tokens are missing, blocks are runs of the sequence."""
    count = min(math.ceil(view.n / BLOCK), keep)
    frames, h, w = view.video_grid()
    if view.grid is None:
        number = torch.arange(view.n) * count // view.n
    else:
        places = min(count, h * w)
        runs = min(math.ceil(count / places), frames, keep // places)  # of time, where a place alone has too many tokens
        time = torch.arange(frames) * runs // frames
        number = (time[:, None] * places + cells((h, w), h * w, places)).flatten()
    order, sizes = number.argsort(stable=True), number.bincount()
    return [block.to(view.tokens.device) for block in order.split(sizes.tolist())]


def _sample(x: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """So many seeds of a block (B, n, D) in their order, (B, S); the squared distance of each from those before it, (B, S), of
    the first infinite; and the likeness of each to all tokens, (B, S, n)."""
    gram = x @ x.transpose(1, 2)
    square = gram.diagonal(dim1=1, dim2=2).contiguous()  # (B, n)
    distance = (square[:, :, None] + square[:, None] - 2 * gram).clamp_min_(0)
    distance.diagonal(dim1=1, dim2=2).fill_(-1.0)  # a seed is never taken again
    order = choose_apart(distance, (square - 2 * gram.mean(2)).argmax(1), count)  # (B, S)
    rows = order[..., None].expand(-1, -1, x.shape[1])
    between = distance.gather(1, rows).gather(2, order[:, None].expand(-1, count, -1))  # (B, S, S)
    later = torch.ones_like(between[0], dtype=torch.bool).tril()
    radius = between.masked_fill(later, torch.inf).amin(1)
    length = square.gather(1, order).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return order, radius, gram.gather(1, rows) / length[..., None]
