"""Ranking for re-identification: the gallery sorted by distance to each query, and the ranks of the right answers.

A right answer has the query's identity. Those that also share its group (camera or scene) would be found by the background
alone: they are taken out before anything is counted. A query with no right answer left is left out and counted.

    AP      mean over the right answers of (right answers so far) / (place)
    CMC@k   share of queries with a right answer among the first k

Distances are squared Euclidean distances of features (float32) scaled to unit length. They are computed in float64 and rounded
to steps of 2**-28: finer than float32, and coarse enough that the order of summation, which depends on how many queries are
ranked together, has no effect. Equal distances keep the gallery's order. Queries are ranked in blocks, so memory grows with
the gallery and not with queries x gallery.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.errors import UserError
from tokensieve.tasks.base import check_finite

CURVE = 50  # places of the CMC curve
NEAREST = 5  # of the gallery, which are kept for each query
MEMORY = 2**28  # bytes that one block may take
EACH = 40  # bytes that a distance takes while it is ranked: distance, its number of steps, key, and what is looked for in keys
PART = 4096  # features of the gallery that are widened to float64 at a time
STEPS = 2**28  # of a distance of 1; distances are 4 at most, so 2**30 steps
EXCLUDED = 2**63 - 2  # the key of what is taken out: behind everything, and no right answer
Groups = Sequence[int] | Tensor


@dataclass(frozen=True)
class Ranking:
    """How well each query was answered."""

    ap: Tensor  # (Q,) float64; NaN where the query was left out
    first: Tensor  # (Q,) int64, the place of the first right answer from 1 on; 0 where the query was left out
    nearest: Tensor  # (Q,k) int64, of the gallery without what is taken out; -1 where fewer are left
    distances: Tensor  # (Q,k) float64, squared

    @property
    def counted(self) -> Tensor:
        """(Q,) which queries have a right answer."""
        return self.first > 0

    @property
    def left_out(self) -> int:
        """How many queries have no right answer."""
        return int((~self.counted).sum())

    @property
    def mean_ap(self) -> float:
        return float(self.ap[self.counted].mean())

    @property
    def mean_ap_stderr(self) -> float:
        """Standard deviation of AP / sqrt(queries); too small, since queries of one identity are not independent."""
        ap = self.ap[self.counted]
        return float(ap.std(correction=0)) / math.sqrt(len(ap))

    def cmc(self, k: int) -> float:
        """The share of queries with a right answer among the first k."""
        return float((self.first[self.counted] <= k).double().mean())

    def metrics(self) -> dict[str, Any]:
        """The numbers by the names that results use."""
        return {
            "mAP": self.mean_ap,
            "mAP_stderr": self.mean_ap_stderr,
            **{f"rank_{k}": self.cmc(k) for k in (1, 5, 10)},
            "cmc": [self.cmc(k) for k in range(1, CURVE + 1)],
        }


class Order(NamedTuple):
    """The gallery as one query ranks it, without what is excluded."""

    indices: Tensor  # (n,) int64, of the gallery, the nearest first
    right: Tensor  # (n,) bool
    distances: Tensor  # (n,) float64, squared


def rank(
    queries: Tensor,
    gallery: Tensor,
    *,
    query_ids: Groups,
    gallery_ids: Groups,
    query_groups: Groups,
    gallery_groups: Groups,
    block: int | None = None,
) -> Ranking:
    """Rank gallery (G,F) for each of queries (Q,F); ids (Q,) and (G,), and so the groups. block: queries at a time."""
    near, far = _on_cpu(queries), _on_cpu(gallery)
    ids, groups = (_whole(query_ids), _whole(gallery_ids)), (_whole(query_groups), _whole(gallery_groups))
    _check_shapes(near, far, ids, groups)
    block = block or block_size(len(far))
    ap, first = np.full(len(near), np.nan), np.zeros(len(near), np.int64)
    best = np.full((len(near), min(NEAREST, len(far))), EXCLUDED)
    for start in range(0, len(near), block):
        these = slice(start, start + block)
        keys = _keys(_distances(near[these], far), ids[0][these], ids[1], groups[0][these], groups[1])
        keys.sort(axis=1)
        ap[these], first[these] = _average_precision(keys)
        best[these] = keys[:, : best.shape[1]]
    if not first.any():
        raise UserError(
            f"none of the {len(near)} queries has a right answer among the {len(far)} of the gallery once those of its own "
            "camera or scene are taken out: are these the right ones?"
        )
    return Ranking(torch.from_numpy(ap), torch.from_numpy(first), *_nearest(best))


def order(
    query: Tensor, gallery: Tensor, *, query_id: int, gallery_ids: Groups, query_group: int, gallery_groups: Groups
) -> Order:
    """The gallery (G,F) as one query (F,) ranks it."""
    near, far = _on_cpu(query[None]), _on_cpu(gallery)
    ids, groups = (_whole([query_id]), _whole(gallery_ids)), (_whole([query_group]), _whole(gallery_groups))
    _check_shapes(near, far, ids, groups)
    distances = _distances(near, far)
    keys = _keys(distances, ids[0], ids[1], groups[0], groups[1])[0]
    keys = np.sort(keys[keys != EXCLUDED])
    indices = torch.from_numpy((keys >> 1) & (2**31 - 1))
    return Order(indices, torch.from_numpy((keys & 1).astype(bool)), torch.from_numpy(distances[0])[indices])


def block_size(gallery: int, memory: int = MEMORY) -> int:
    """How many queries are ranked at a time, so that their distances to the whole gallery take no more than this memory."""
    return max(1, memory // (EACH * max(1, gallery)))


def _on_cpu(features: Tensor) -> Tensor:
    return check_finite(features.detach().cpu().float())


def _whole(numbers: Groups) -> Any:
    return np.asarray(numbers.cpu() if isinstance(numbers, Tensor) else list(numbers), dtype=np.int64)


def _check_shapes(near: Tensor, far: Tensor, *pairs: tuple[Any, Any]) -> None:
    for of_queries, of_gallery in pairs:
        assert of_queries.shape == (len(near),) and of_gallery.shape == (len(far),), "one id and one group each"
    assert len(far) < 2**31, "the key has 31 bits for an index"
    if not len(near) or not len(far):
        raise UserError("there is nothing to rank: the query or the gallery is empty.")


def _distances(near: Tensor, far: Tensor) -> Any:
    """(b,F), (G,F) -> (b,G) squared distances in float64."""
    queries = F.normalize(near.double(), dim=1)
    made = torch.empty(len(near), len(far), dtype=torch.float64)
    for start in range(0, len(far), PART):
        part, here = F.normalize(far[start : start + PART].double(), dim=1), made[:, start : start + PART]
        here.copy_((queries @ part.T).mul_(-2).add_(part.square().sum(1)))  # (b, part)
    return made.add_(queries.square().sum(1, keepdim=True)).clamp_(min=0).numpy()


def _keys(distances: Any, ids: Any, gallery_ids: Any, groups: Any, gallery_groups: Any) -> Any:
    """(b,G) int64 that sort as the gallery is ranked: steps of distance, then the index; the last bit marks a right answer."""
    right = ids[:, None] == gallery_ids
    keys = np.rint(distances * STEPS).astype(np.int64)
    keys <<= 31
    keys |= np.arange(len(gallery_ids))
    keys <<= 1
    keys |= right
    keys[right & (groups[:, None] == gallery_groups)] = EXCLUDED
    return keys


def _nearest(keys: Any) -> tuple[Tensor, Tensor]:
    """Indices (b,k) of the gallery and squared distances (b,k) from sorted keys (b,k)."""
    is_there = keys != EXCLUDED
    indices = np.where(is_there, (keys >> 1) & (2**31 - 1), -1)
    return torch.from_numpy(indices), torch.from_numpy(np.where(is_there, (keys >> 32) / STEPS, np.nan))


def _average_precision(keys: Any) -> tuple[Any, Any]:
    """AP (b,) and the first right answer's place (b,) from sorted keys (b,G)."""
    rows, places = np.nonzero(keys & 1)
    count = np.bincount(rows, minlength=len(keys))
    begin = np.cumsum(count) - count  # where each row's right answers begin
    so_far = np.arange(len(rows)) - begin[rows] + 1
    sums = np.bincount(rows, weights=so_far / (places + 1), minlength=len(keys))
    answered = count > 0
    ap, first = np.full(len(keys), np.nan), np.zeros(len(keys), np.int64)
    ap[answered] = sums[answered] / count[answered]
    first[answered] = places[begin[answered]] + 1
    return ap, first
