"""DiffRate, with given rates: the least attended tokens are dropped, the next ones merged into those that stay.

Chen et al., "DiffRate: Differentiable Compression Rate for Efficient Vision Transformers", ICCV 2023, arXiv:2305.17997. Written
from the formulas; no licence file of the released code is known to us.

    sort by CLS attention: the head stays, the middle is merged, the tail is dropped
    each token of the middle joins the most similar of the head (cosine of tokens, never CLS); size-weighted mean

Place: in every block, between attention and MLP. The authors learn how many go at each block and how; here the plan says how
many, and `merged` which share of them is merged. Later attention adds log(size), the option `sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.joining import join_most_similar
from tokensieve.methods.registry import method


def check_options(options: Mapping[str, Any]) -> None:
    if not 0 <= options["merged"] <= 1:
        raise UserError(f"diffrate: merged={options['merged']} is not a share, from 0 (all dropped) to 1 (all merged)")


@method(
    summary="the least attended tokens dropped, the next ones merged into those that stay",
    paper='Chen et al., "DiffRate: Differentiable Compression Rate", ICCV, 2023, arXiv:2305.17997',
    needs=("attention",),
    selects=False,
    norm=0.0,
    budget=lambda options: "-8",
    where="*.attn",
    check=check_options,
)
def diffrate(view: View, keep: int, *, merged: float = 0.5) -> Reduction:
    """The head, and the groups of the middle."""
    scores = view.coarse().float()
    order = scores.argsort(dim=1, descending=True, stable=True)
    tail = order[:, keep + round((view.n - keep) * merged) :]
    index = order[:, :keep].sort(1).values
    groups = join_most_similar(view.tokens, index).scatter(1, tail, -1)
    return Reduction.merge(groups, index, view.sizes_or_ones(), scores)
