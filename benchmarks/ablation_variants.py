"""The variants of `cover` that ablation.py and ablation_tasks.py compare."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tokensieve import Reduction, View, method
from tokensieve.methods.farthest_points import farthest_points
from tokensieve.scoring import top

NEIGHBOURS = 5  # of a token, whose distances make its density


@method(summary="farthest points: the seeds of cover")
def far(view: View, keep: int) -> Reduction:
    return Reduction.keep(farthest_points(view.tokens, keep, 2.0)[0], view.n)


@method(summary="density peaks: dense tokens far from any denser one")
def peaks(view: View, keep: int) -> Reduction:
    x = view.tokens.float()
    distance = torch.cdist(x, x) / math.sqrt(x.shape[-1])  # (B, N, N)
    nearest = distance.topk(min(NEIGHBOURS + 1, view.n), largest=False).values  # its own distance, 0, is among them
    density = (-nearest.square().sum(-1) / NEIGHBOURS).exp()  # (B, N)
    denser = density[:, None] > density[:, :, None]  # (B, N, N): the column is denser than the row
    apart = distance.masked_fill(~denser, math.inf).amin(-1)
    apart = torch.where(apart.isinf(), distance.amax(-1), apart)  # the densest token
    return Reduction.keep(top(density * apart, keep), view.n)


@method(summary="cover with the nearest seed by Euclidean distance", selects=False, norm=2.0)
def near(view: View, keep: int) -> Reduction:
    index, _ = farthest_points(view.tokens, keep, 2.0)  # (B, K)
    x = view.tokens.float()
    seeds = x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
    groups = torch.cdist(x, seeds).argmin(-1)  # (B, N)
    groups.scatter_(1, index, torch.arange(keep, device=index.device).expand_as(index))
    return Reduction.merge(groups, index, view.sizes_or_ones())


class Variant(NamedTuple):
    """One way to choose seeds and to handle the other tokens."""

    seeds: str
    rest: str
    norm: float | None  # None: nothing is merged
    keep: int
    place: str
    plan: str


def variants(place: str, keeps: Sequence[int], norms: Sequence[float]) -> Iterator[Variant]:
    """All seeds, dropped and merged into the most similar seed."""
    for k in keeps:
        for seeds in ("far", "anchor", "peaks", "grid", "random"):
            options = f"k={k}," if seeds == "anchor" else ""
            yield Variant(seeds, "drop", None, k, place, f"{seeds}@{place}:{k}({options}rest=drop)")
            for norm in norms:
                plan = f"{seeds}@{place}:{k}({options}rest=merge,norm={norm})"
                yield Variant(seeds, "merge", norm, k, place, plan)


def more_assignments(place: str, keeps: Sequence[int], norms: Sequence[float]) -> Iterator[Variant]:
    """Farthest points, merged by Euclidean distance, and without sizes."""
    for k in keeps:
        for norm in norms:
            yield Variant("far", "merge, Euclidean", norm, k, place, f"near@{place}:{k}(norm={norm})")
            plan = f"far@{place}:{k}(rest=merge,norm={norm},sizes=no)"
            yield Variant("far", "merge, no sizes", norm, k, place, plan)
