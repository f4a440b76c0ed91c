"""ToMe: in every block, merge the r most similar pairs of tokens, found by one bipartite matching of their keys.

Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023, arXiv:2210.09461. Written from the formulas; the released code
is CC-BY-NC 4.0.

    m = mean over heads of the keys of the block's attention           prefix tokens are counted, but never merged
    A = tokens 0, 2, 4, ... and B = tokens 1, 3, 5, ...                so with CLS alone before them, the first patch is in B
    each token of A finds its most similar token of B                  cosine of m
    the r tokens of A with the highest cosine are merged into theirs   size-weighted mean; sizes add up

Place and budget of the paper: between attention and MLP of every block, r = 8 (`tome` is `tome@*.attn:-8`). Schedules: the
same r in every block; with `inflect`, r falls or grows over the blocks, `tome:-8(inflect=-1)` from 16 to 0; or a list,
`tome(schedule=24/16/8)`, and nothing is merged behind its end. A token of A is merged at most once, so at most half of the
patches go at one position: r <- min(r, floor(N / 2)), N without prefix tokens.

The output order is that of the released code, because the next split depends on it: unmerged tokens of A, then B. The tokens
of A keep their order if there are prefix tokens; else they are in the order of falling similarity.

Proportional attention (log size on later keys) is the option `prop_attn`. Without it means are still weighted by size, as in
the released code; with `sizes=no` they are not. Differences: of equal cosines the first wins, a key of length 0 has the cosine
0, and all prefix tokens are protected, not only CLS and distillation. Keys are those that the attention multiplies: after
their norm and rotation, where a tower has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError, short
from tokensieve.methods.matching import match, min_keep
from tokensieve.methods.registry import Place, method


def check_options(options: Mapping[str, Any]) -> None:
    if not -1 <= options["inflect"] <= 1:
        raise UserError(f"tome: inflect={options['inflect']} is not from -1 (fewer in later blocks) to 1 (more)")
    if options["schedule"] and not re.fullmatch(r"[0-9]{1,6}(/[0-9]{1,6})*", options["schedule"]):
        raise UserError(f"tome: schedule={short(options['schedule'])} is not numbers of tokens to merge, such as 24/16/8/0")


def count(place: Place, options: Mapping[str, Any]) -> int:
    """The tokens that are left at one of the cuts: r of the released schedules fewer."""
    if options["schedule"]:
        numbers = [int(number) for number in options["schedule"].split("/")]
        return max(1, place.n - (numbers[place.number] if place.number < len(numbers) else 0))
    if not options["inflect"]:
        return place.keep
    r = place.n - place.keep
    least = int(r * (1 - options["inflect"]))
    step = (2 * r - 2 * least) / max(1, place.total - 1)
    return max(1, place.n - int(least + step * place.number))


@method(
    summary="the most similar pairs of tokens merged, in every block, by a bipartite matching of keys",
    paper='Bolya et al., "Token Merging: Your ViT But Faster", ICLR, 2023, arXiv:2210.09461',
    needs=("attention",),
    selects=False,
    budget=lambda options: "-8",
    norm=0.0,
    where="*.attn",
    min_keep=min_keep,
    count=count,
    check=check_options,
)
def tome(view: View, keep: int, *, prop_attn: bool = True, inflect: float = 0.0, schedule: str = "") -> Reduction:
    """One matching; never fewer than half of the tokens are kept."""
    assert view.attention is not None
    r = view.n - max(keep, min_keep(view.n))
    groups, index = match(view.attention.keys(), view.attention.prefix, r)
    return replace(Reduction.merge(groups, index, view.sizes_or_ones()), prop_attn=prop_attn)
