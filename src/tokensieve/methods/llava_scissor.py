"""LLaVA-Scissor: similar tokens of a frame are one component of a graph, and so are similar components of a video.

Sun et al., "LLaVA-Scissor: Token Compression with Semantic Connected Components for Video LLMs", 2025, arXiv:2506.21862.
Written from the rules; the released code has no licence file.

    components of tokens: tokens with a cosine above tau are neighbours; of n tokens min(n, ceil(ln n / eps^2)), at random, are
        joined with all their neighbours
    components of each frame become their means; components of all these means become their means y
    every token of the video goes to the most similar y: y <- (y + sum of those) / (1 + their number)

The number of tokens is the video's own, by tau; transitive chains can join unlike tokens. A budget is the most that stay: those
of the largest components, whose means the tokens of the others go to. A component is represented by its token with most
neighbours. A token may go into two outputs, so the reduction is a dense matrix of outputs times tokens: 4 K N bytes of each
video, 63 MB for N = 12,544 tokens (64 frames) with K = 1,254 outputs. Place: the language model's input. An image is a video of
one frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.clips import by_frame
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, most_similar

ROWS = 256  # of the graph, in memory at a time


def check_options(options: Mapping[str, Any]) -> None:
    """Raises a UserError for options that make no sense."""
    if not -1 <= options["tau"] <= 1 or not options["eps"] > 0:
        raise UserError(f"llava_scissor: tau={options['tau']} is a cosine, from -1 to 1; eps={options['eps']} is above 0")


@method(
    summary="connected components of similar tokens, first of each frame, then of the video",
    paper='Sun et al., "LLaVA-Scissor", 2025, arXiv:2506.21862',
    selects=False,
    adaptive=True,
    check=check_options,
    budget=lambda options: "100%",
    where=lambda depth, decoder: "llm.0" if decoder else "out",
    no_graph="how many components there are depends on the tokens",
)
@full_precision
def llava_scissor(view: View, keep: int, *, tau: float = 0.9, eps: float = 0.05) -> Reduction:
    videos = zip(by_frame(view), view.noise(), strict=True)
    return Reduction.stack([_reduce(x, noise, keep, tau, eps) for x, noise in videos])


def _reduce(x: Tensor, noise: Tensor, keep: int, tau: float, eps: float) -> Reduction:
    """Of one video: x (F, n, D), noise (N,)."""
    (frames, n), tokens = x.shape[:2], x.flatten(0, 1)
    labels, firsts = torch.empty_like(noise, dtype=torch.long), list[Tensor]()
    made = 0
    for frame in range(frames):
        inside = slice(frame * n, (frame + 1) * n)
        found, first = components(x[frame], noise[inside], tau, eps)
        labels[inside] = made + found
        firsts.append(frame * n + first)
        made += len(first)
    first = torch.cat(firsts)  # (C,), the token of each component of a frame
    size = torch.bincount(labels, minlength=made)
    means = torch.zeros((made, x.shape[2]), device=x.device).index_add(0, labels, tokens) / size[:, None]
    joint, middle = components(means, noise[first], tau, eps)  # (C,), (T,)
    parts = torch.bincount(joint, minlength=len(middle))
    share = 1.0 / (parts[joint] * size)  # (C,), of each token in the mean of means
    mass = torch.zeros(len(middle), device=x.device).index_add(0, joint, size.float())
    kept = mass.argsort(descending=True, stable=True)[:keep]
    kept = kept[first[middle[kept]].argsort()]  # (K,), in the order of their tokens
    rows = torch.zeros((len(kept), frames * n), device=x.device)
    number = torch.full_like(middle, -1).scatter(0, kept, torch.arange(len(kept), device=x.device))
    output = number[joint[labels]]  # (N,), -1: its component does not stay
    there = (output >= 0).nonzero()[:, 0]
    rows[output[there], there] = share[labels[there]]
    goal = most_similar(tokens[None], (rows @ tokens)[None])[0]  # (N,)
    rows[goal, torch.arange(len(goal), device=x.device)] += 1
    return Reduction(first[middle[kept]][None], frames * n, weight=(rows / rows.sum(1, keepdim=True))[None])


def components(x: Tensor, noise: Tensor, tau: float, eps: float) -> tuple[Tensor, Tensor]:
    """The component of each token x (n, D), numbered in the order of their tokens with most neighbours: (n,), and those: (C,).

    noise: (n,), the tokens with the largest are joined with their neighbours.
    """
    n = len(x)
    joined = noise.argsort(descending=True, stable=True)[: min(n, math.ceil(math.log(n) / eps**2) if n > 1 else 1)]
    asks = torch.zeros_like(noise, dtype=torch.bool).scatter(0, joined, True)
    unit = F.normalize(x, dim=-1)
    root, neighbours = torch.arange(n, device=x.device), []
    for rows in torch.arange(n, device=x.device).split(ROWS):
        near = unit[rows] @ unit.T > tau  # (R, n)
        neighbours.append(near.sum(1))
        one, other = (near & asks[rows, None]).nonzero().unbind(1)
        root = _join(root, rows[one], other)
    degree = torch.cat(neighbours)
    _, labels = root.unique(return_inverse=True)
    key = degree * n + torch.arange(n - 1, -1, -1, device=x.device)  # most neighbours, then the first token
    best = key.new_full((int(labels.amax()) + 1,), -1).scatter_reduce(0, labels, key, "amax")
    first = n - 1 - best % n
    first, order = first.sort()
    return order.argsort()[labels], first


def _join(root: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The root of each token, (n,), after the components of the tokens one (E,) and other (E,) were joined."""
    while True:
        a, b = root[one], root[other]
        apart = a != b
        if not bool(apart.any()):
            return root
        low, high = torch.minimum(a, b)[apart], torch.maximum(a, b)[apart]
        root = root.scatter_reduce(0, high, low, "amin")
        while not torch.equal(root[root], root):
            root = root[root]
