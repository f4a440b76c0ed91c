"""PruMerge: tokens with outstanding CLS attention are kept, each with its nearest others added to it.

Shang et al., "LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models", ICCV 2025, arXiv:2403.15388.
Written from the formulas; the released code is Apache-2.0.

    attention = softmax(q k^T / sqrt(C)) as one head of full width C;  a = its CLS row
    kept: the int(N ratio) largest a; ratio = the share of a above Q3 + 1.5 (Q3 - Q1)
    x_i <- x_i + sum of a_j x_j over the 32 others with the most similar keys (not normalised)
    one more token: the sum of a_j x_j over all that are not kept
    `prumerge_plus` also keeps tokens evenly spread over the image: every int(int(1 / ratio) / 3)-th, but for the last one

Place: at the tower's output. The number of tokens is the image's own, quartiles are of the image, not of the batch; a budget
is the most that are kept beside the extra token, and where no token stands out one is kept. With `adaptive=false` the budget
of `prumerge` is the number (authors: 1/8 or 1/16 of N); `prumerge_plus` keeps int(N / 8) tokens and every 8th from the 5th on,
but for the last one. A token that is among both counts once, and all that are dropped are in the extra token (the released code
keeps doubles there, and loses as many). The authors take queries and keys of the last block, which a LLaVA does not run; here
they are of the block before the cut. A spacing of 0, at which the released code stops, is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.attention_rows import from_cls, joined_heads
from tokensieve.methods.outliers import above_quartiles
from tokensieve.methods.registry import method
from tokensieve.scoring import cosine, full_precision

NEIGHBOURS = 32
SHARE = 8  # prumerge_plus with a fixed number: one in so many by attention, and as many evenly spread
PAPER = 'Shang et al., "LLaVA-PruMerge", ICCV, 2025, arXiv:2403.15388'


@method(
    summary="tokens with outstanding CLS attention, with their nearest others added to them",
    paper=PAPER,
    needs=("attention",),
    selects=False,
    adaptive=True,
    budget=lambda options: "100%",
    where="out",
    extra=1,
    sums=True,
)
def prumerge(view: View, keep: int, *, adaptive: bool = True) -> Reduction:
    """The outliers of the attention, at most `keep`."""
    return _reduce(view, keep, adaptive, plus=False)


@method(
    summary="prumerge, with tokens that are evenly spread over the image",
    paper=PAPER,
    needs=("attention",),
    selects=False,
    adaptive=True,
    budget=lambda options: "100%",
    where="out",
    extra=1,
    sums=True,
)
def prumerge_plus(view: View, keep: int, *, adaptive: bool = True) -> Reduction:
    """The outliers of the attention and evenly spread tokens, at most `keep`."""
    return _reduce(view, keep, adaptive, plus=True)


@full_precision
def _reduce(view: View, keep: int, adaptive: bool, plus: bool) -> Reduction:
    assert view.attention is not None
    attention = joined_heads(view.attention)
    scores, n = from_cls(attention), view.n
    keys = attention.k[:, 0, attention.prefix :]  # (B, N, C)
    similar = cosine(keys, keys) - 3 * torch.eye(n, device=keys.device)  # a token is not its own neighbour
    nearest = similar.argsort(dim=-1, descending=True, stable=True)[..., :NEIGHBOURS]  # (B, N, 32)
    fixed = n // SHARE if plus else keep
    counts = above_quartiles(scores).sum(1).tolist() if adaptive else [fixed] * len(scores)
    rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # (B, N)
    images = []
    for b, count in enumerate(counts):
        kept = rank[b] < max(1, min(count, keep))
        if plus:
            start, step = (0, max(1, int(int(n / max(1, count)) / 3))) if adaptive else (SHARE // 2, SHARE)
            spread = torch.arange(start, n - 1, step, device=keys.device)
            room = keep - int(kept.sum())
            kept = kept.index_fill(0, spread[~kept[spread]][:room], True)
        images.append(_merge(kept, nearest[b], scores[b]))
    return Reduction.stack(images)


def _merge(kept: Tensor, nearest: Tensor, scores: Tensor) -> Reduction:
    """Of one image: kept (N,), neighbours (N, 32), attention (N,)."""
    index = kept.nonzero()[:, 0]
    weight = torch.zeros((len(index), len(kept)), device=kept.device)
    near = nearest[index]  # (K, 32)
    weight = weight.scatter(1, near, scores[near]).scatter(1, index[:, None], 1.0)
    if len(index) < len(kept):
        weight = torch.cat([weight, (scores * ~kept)[None]])
        index = torch.cat([index, (scores - 2.0 * kept).argmax(keepdim=True)])
    return Reduction(index[None], len(kept), weight=weight[None], scores=scores[None])
