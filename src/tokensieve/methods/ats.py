"""ATS: tokens are sampled by their significance, as many different ones as the image needs.

Fayyaz et al., "Adaptive Token Sampling for Efficient Vision Transformers", ECCV 2022, arXiv:2111.15667. Written from the
formulas.

    S_j = A_j ||V_j|| / sum_i A_i ||V_i||            A: CLS attention, heads summed; V: values of all heads together; patches
    F = the cumulative sum of S in ascending order, over all patches, min-max normalised
    y_k = F0 + (1 - F0) k / (n - 1), k = 0 .. n - 1    F0: the smallest F above 0
    for each y the token with the nearest F among the n most significant ones; doubles are dropped

The number of tokens is the image's own, at most n, the budget. Place: inside several blocks, between attention and MLP, so that
dropped tokens still count as keys in the block; here blocks 4, 7 and 10 of 12. The released code counts CLS in n. With fewer
samples than tokens the least significant ones cannot be sampled, as released; F stays that of all patches.
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
)
@full_precision
def ats(view: View, keep: int) -> Reduction:
    """The sampled tokens in raster order, without doubles."""
    assert view.attention is not None
    attention, p = view.attention, view.attention.prefix
    assert attention.v is not None
    norms = attention.v[:, :, p:].float().transpose(1, 2).flatten(2).norm(dim=-1)  # (B, N)
    real = view.sizes_or_ones() > 0  # the others are padding of an earlier cut
    weight = view.coarse().float() * norms * real
    significance = weight / weight.sum(1, keepdim=True).clamp_min(TINY)
    chosen = torch.stack([_sample(significance[b], real[b], keep) for b in range(len(weight))])
    return Reduction.keep_some(chosen, view.sizes, significance)


def _sample(significance: Tensor, real: Tensor, keep: int) -> Tensor:
    """The tokens of one image (N,) that are sampled, at most `keep`: (N,), bool."""
    patches = int(real.sum())
    count = min(keep, patches)
    rising = significance.masked_fill(~real, -1.0).sort(stable=True).indices[len(real) - patches :]
    total = significance[rising].cumsum(0)
    cdf = (total - total[0]) / (total[-1] - total[0]).clamp_min(TINY)  # (patches,)
    start = cdf.masked_fill(cdf <= 0, torch.inf).amin().clamp_max(1.0)  # F0
    steps = torch.linspace(0, 1, count, device=cdf.device) if count > 1 else torch.ones(1, device=cdf.device)
    rising, cdf = rising[patches - count :], cdf[patches - count :]  # the most significant ones
    at = ((start + (1 - start) * steps)[:, None] - cdf).abs().argmin(-1)  # (count,)
    return torch.zeros_like(real).index_fill(0, rising[at], True)
