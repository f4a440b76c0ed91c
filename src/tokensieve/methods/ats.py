"""ATS: tokens are sampled by their significance, as many different ones as the image needs.

Fayyaz et al., "Adaptive Token Sampling for Efficient Vision Transformers", ECCV 2022, arXiv:2111.15667. Written from the
formulas; the released code is Apache-2.0.

    S_j = A_j ||V_j|| / sum_i A_i ||V_i||            A: CLS attention, heads summed; V: values of all heads together; patches
    F = the cumulative sum of S in ascending order, over all patches, min-max normalised
    y_k = F0 + (1 - F0) k / (n - 1), k = 0 .. n - 1    F0: the smallest F above 0
    for each y the token with the nearest F among the n most significant ones; doubles are dropped

The number of tokens is the image's own, at most n, the budget. Place: inside several blocks, between attention and MLP, so that
dropped tokens still count as keys in the block; here blocks 4, 7 and 10 of 12. The released code counts CLS in n, which is 8 at
least: 7 patches here. With fewer samples than tokens the least significant ones cannot be sampled, as released; F stays that of
all patches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.places import inside_quarters
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision

TINY = torch.finfo(torch.float32).tiny


@method(
    summary="tokens sampled by attention and value norm, as many as the image needs",
    paper='Fayyaz et al., "Adaptive Token Sampling for Efficient Vision Transformers", ECCV, 2022, arXiv:2111.15667',
    needs=("attention", "values"),
    adaptive=True,
    budget=lambda options: "100%",
    where=inside_quarters,
    min_keep=lambda n: min(n, 7),
)
@full_precision
def ats(view: View, keep: int) -> Reduction:
    """The sampled tokens in raster order, without doubles."""
    assert view.attention is not None
    attention, p = view.attention, view.attention.prefix
    assert attention.v is not None
    norms = attention.v[:, :, p:].float().transpose(1, 2).flatten(2).norm(dim=-1)  # (B, N)
    weight = view.coarse().float() * norms
    significance = weight / weight.sum(1, keepdim=True).clamp_min(TINY)
    chosen = torch.stack([_sample(each, keep) for each in significance])
    return Reduction.keep_some(chosen, view.sizes, significance)


def _sample(significance: Tensor, keep: int) -> Tensor:
    """The tokens of one image (N,) that are sampled, at most `keep`: (N,), bool."""
    n = len(significance)
    count = min(keep, n)
    rising = significance.sort(stable=True).indices
    total = significance[rising].cumsum(0)
    cdf = (total - total[0]) / (total[-1] - total[0]).clamp_min(TINY)  # (N,)
    start = cdf.masked_fill(cdf <= 0, torch.inf).amin().clamp_max(1.0)  # F0
    steps = torch.linspace(0, 1, count, device=cdf.device) if count > 1 else torch.ones(1, device=cdf.device)
    rising, cdf = rising[n - count :], cdf[n - count :]  # the most significant ones
    at = ((start + (1 - start) * steps)[:, None] - cdf).abs().argmin(-1)  # (count,)
    return torch.zeros_like(significance, dtype=torch.bool).index_fill(0, rising[at], True)
