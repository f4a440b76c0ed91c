"""FlashVID: of a video in segments, attended tokens that are far apart; the others follow each other through time as trees.

"FlashVID", ICLR 2026. Written from the rules; the released code is MIT.

    segments: parted where neighbouring mean tokens have a cosine below 0.9, but in at least 8 segments
    of each frame m = ceil(rho n) tokens are due; rho is the share that the plan states (the authors' 25% times 1.25 for what
        they drop later), or of a number of tokens the share that it is of N
    ceil(alpha m) are chosen one after the other, farthest from those chosen, by D_ij = (1 - cos_ij) a_j, a the attention; the
        first has the largest distance to its nearest
    each other token is linked to its most similar other token one frame before, if their cosine is above `similar`; where too
        few tokens would be left, only the most similar ones are linked
    trees of links become the mean of their tokens, at their root; the roots of a frame are clustered (DPC-KNN, 7 neighbours)
        to the share of them that meets the budget, and clusters become their mean

Together they are near rho N tokens. Place: before layer 0 of the language model. The authors go on inside it:
`flashvid@llm.0:31.25% + fastv@llm.20:30%` is their plan. The attention is that of CLS, of the pooling query, or received; in a
language model that of the last word. Two things differ from the released code: it divides the sum of a tree by the number
of direct children, so that deep trees come out too long (the paper says mean); and in a segment of one frame it clusters the
chosen tokens again. An image is a video of one frame.
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
from tokensieve.methods.choose_apart import choose_apart
from tokensieve.methods.clips import attention_by_frame, by_frame, in_order, segments
from tokensieve.methods.density_peaks import density_peaks
from tokensieve.methods.places import floored_share
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision

SEGMENTS, SAME_SEGMENT = 8, 0.9
NEIGHBOURS = 7


def check_options(options: Mapping[str, Any]) -> None:
    """Raises a UserError for options that make no sense."""
    if not 0 < options["alpha"] <= 1 or not -1 <= options["similar"] <= 1:
        raise UserError(
            f"flashvid: alpha={options['alpha']} is a share above 0, similar={options['similar']} a cosine, from -1 to 1"
        )


@method(
    summary="of a video, attended tokens that are far apart, and trees of similar tokens through time",
    paper='"FlashVID", ICLR, 2026',
    needs=("attention",),
    selects=False,
    adaptive=True,
    check=check_options,
    budget=lambda options: "31.25%",
    count=floored_share,
    where=lambda depth, decoder: "llm.0" if decoder else "out",
)
@full_precision
def flashvid(view: View, keep: int, *, alpha: float = 0.7, similar: float = 0.8) -> Reduction:
    videos, made = zip(by_frame(view), attention_by_frame(view), strict=True), []
    for x, attention in videos:
        frames, n = attention.shape
        due = min(n, math.ceil(keep / frames if view.share is None else n * view.share))
        chosen = _far_apart(x, attention, math.ceil(alpha * due))  # (F, n)
        groups, shares = torch.full((frames * n,), -1, device=x.device), torch.zeros(frames * n, device=x.device)
        at = [chosen.flatten().nonzero()[:, 0]]
        groups[at[0]], shares[at[0]] = torch.arange(len(at[0]), device=x.device), 1.0
        if due > (each := math.ceil(alpha * due)):
            for segment in segments(x.mean(1), SEGMENTS, SAME_SEGMENT):
                root = _roots(x, chosen, segment, due, similar)
                _cluster(x, chosen, segment, root, due - each, groups, shares, at)
        index, assigned = in_order(torch.cat(at), groups)
        made.append(Reduction(index[None], frames * n, assigned=assigned[None], shares=shares[None]))
    return Reduction.stack(made)


def _far_apart(x: Tensor, attention: Tensor, count: int) -> Tensor:
    """So many tokens of each frame, True where chosen: x (F, n, D), attention (F, n) -> (F, n)."""
    unit = F.normalize(x, dim=-1)
    distance = (1 - unit @ unit.transpose(1, 2)).clamp_min(0) * attention[:, None]  # (F, n, n)
    itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    first = distance.masked_fill(itself, torch.inf).amin(1).argmax(1)  # (F,)
    picked = choose_apart(distance.masked_fill(itself, -1.0), first, count)
    return torch.zeros_like(attention, dtype=torch.bool).scatter(1, picked, True)


def _roots(x: Tensor, chosen: Tensor, segment: range, due: int, similar: float) -> Tensor:
    """The root of each token of a segment of l frames, as a token of the video: (l, n)."""
    inside, (length, n) = slice(segment.start, segment.stop), (len(segment), x.shape[1])
    own = torch.arange(segment.start * n, segment.stop * n, device=x.device).view(length, n)
    unit, free = F.normalize(x[inside], dim=-1), ~chosen[inside]
    cosines = unit[1:] @ unit[:-1].transpose(1, 2)  # (l - 1, n, n)
    closeness, parent = cosines.masked_fill(~(free[1:, :, None] & free[:-1, None]), -1.0).max(-1)
    closeness = F.pad(closeness, (0, 0, 1, 0), value=-1.0)  # (l, n)
    linked = closeness > similar
    if length * n - int(linked.sum()) < due * length:
        most = closeness.flatten().sort(descending=True).values[(n - due) * length - 1] if due < n else 1.0
        linked = closeness > max(float(most), -1 + 1e-6)
    roots = [own[0]]
    for frame in range(1, length):
        roots.append(torch.where(linked[frame], roots[-1][parent[frame - 1]], own[frame]))
    return torch.stack(roots)


def _cluster(
    x: Tensor, chosen: Tensor, segment: range, root: Tensor, each: int, groups: Tensor, shares: Tensor, at: list[Tensor]
) -> None:
    """Clusters the roots (l, n) of a segment frame by frame, to `each` a frame on average; adds groups, shares and outputs."""
    flat, n = x.flatten(0, 1), x.shape[1]
    free = (~chosen[segment.start : segment.stop]).flatten().nonzero()[:, 0] + segment.start * n  # tokens
    trees = root.flatten()[free - segment.start * n]  # the root of each of them
    roots, tree, size = trees.unique(return_inverse=True, return_counts=True)
    means = torch.zeros((len(roots), x.shape[2]), device=x.device).index_add(0, tree, flat[free]) / size[:, None]
    share = each * len(segment) / max(1, len(roots))
    cluster, count = torch.zeros_like(roots), torch.ones_like(roots)  # of each tree: its output, and the trees of that
    made = sum(map(len, at))
    for frame in segment:
        here = (roots // n == frame).nonzero()[:, 0]
        centres, labels = torch.arange(len(here), device=x.device), torch.arange(len(here), device=x.device)
        if share < 1 and len(here):
            clusters = math.ceil(len(here) * share)
            centres, labels = (each[0] for each in density_peaks(means[here][None], clusters, min(clusters, NEIGHBOURS)))
        cluster[here] = made + labels
        count[here] = torch.bincount(labels, minlength=len(centres))[labels] if len(here) else labels
        at.append(roots[here[centres]])
        made += len(centres)
    groups[free] = cluster[tree]
    shares[free] = 1.0 / (count * size)[tree]
