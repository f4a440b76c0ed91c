"""SparseVLM: words that the image speaks to rate the vision tokens; what is dropped is recycled into a few clusters.

Zhang et al., "SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference", ICML 2025,
arXiv:2410.04417. Version 1.5, written from the formulas; the released code is Apache-2.0. `sparsevlm2` is version 2.0.

    raters, once, on input embeddings: m_t = mean over vision tokens of softmax over words of H_v . H_t; raters have m_t >
        mean(m); words before the image do not count
    P_v = mean over the raters of the attention to v, mean over heads, of the layer that just ran; the n_l largest are kept
    of the dropped ones, the int(0.3 n) + 1 largest P become int(0.1 of them) + 1 clusters by density peaks, k = that number;
    their means follow the kept tokens

Place: behind layers 2, 6 and 15 of 32 (from 0), with n_l by the option `tokens`: 192 is 300, 200, 110 of 576 tokens, 128 is
303, 110, 36; 96 is 238, 48, 26; 64 is 66, 30, 17; other numbers of tokens in proportion. A budget in the plan replaces them.
Positions stay the original ones; version 1.5 numbers them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from tokensieve.core import Reduction, View
from tokensieve.methods.density_peaks import density_peaks
from tokensieve.methods.raters import find_raters
from tokensieve.methods.registry import Count, Place, method
from tokensieve.scoring import full_precision, gather_rows, top

TABLES = {"192": (300, 200, 110), "128": (303, 110, 36), "96": (238, 48, 26), "64": (66, 30, 17)}
TOKENS = 576  # of an image, for the tables


def count_by(tables: Mapping[str, tuple[int, ...]]) -> Count:
    """The number of the table, or that of the plan's budget."""

    def count(place: Place, options: Mapping[str, Any]) -> int:
        if place.keep < place.n:
            return place.keep
        numbers = tables[options["tokens"]]
        wanted = numbers[min(place.number, len(numbers) - 1)] * place.first // TOKENS
        return max(1, min(wanted, place.n - 1))

    return count


def recycled(n: int, keep: int) -> tuple[int, int]:
    """How many of the dropped tokens are recycled, and into how many clusters."""
    dropped = n - keep
    chosen = min(dropped, int(0.3 * dropped) + 1)
    return chosen, min(chosen, int(0.1 * chosen) + 1)


def places(depth: int, decoder: int) -> str:
    """Behind layers 2, 6 and 15 of 32."""
    return "llm." + ",".join(map(str, sorted({max(1, min(decoder - 1, round(at * decoder / 32))) for at in (3, 7, 16)})))


@method(
    summary="in the language model, vision tokens rated by relevant words; dropped ones are recycled",
    paper='Zhang et al., "SparseVLM", ICML, 2025, arXiv:2410.04417',
    needs=("attention", "question", "inputs"),
    selects=False,
    budget=lambda options: "100%",
    where=places,
    count=count_by(TABLES),
    extra=lambda n, keep: recycled(n, keep)[1],
    attention="previous",
)
@full_precision
def sparsevlm(view: View, keep: int, *, tokens: Literal["192", "128", "96", "64"] = "192") -> Reduction:
    """The best rated tokens, and clusters of the best of the others."""
    assert view.attention is not None
    raters = find_raters(view)  # (B, T)
    rows = view.attention.text_heads().mean(1)  # (B, T, N)
    scores = (rows * raters[..., None]).sum(1) / raters.sum(1, keepdim=True).clamp_min(1)  # (B, N)
    index = top(scores, keep)
    n_recycled, clusters = recycled(view.n, keep)
    left = scores.scatter(1, index, -torch.inf).argsort(dim=1, descending=True, stable=True)[:, :n_recycled]  # (B, R)
    left = left.sort(1).values
    centres, labels = density_peaks(gather_rows(view.tokens, left), clusters, clusters)
    numbers = torch.arange(keep, device=index.device).expand_as(index)
    groups = torch.full_like(scores, -1, dtype=torch.long).scatter(1, index, numbers).scatter(1, left, labels + keep)
    merged = Reduction.merge(groups, torch.cat([index, left.gather(1, centres)], dim=1), torch.ones_like(scores), scores)
    merged.sizes = None
    return merged
