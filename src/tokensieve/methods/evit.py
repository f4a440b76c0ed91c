"""EViT: the patches that CLS attends to most are kept; the others become one token, the sum by their attention.

Liang et al., "Not All Patches are What You Need: Expediting Vision Transformers via Token Reorganizations", ICLR 2022,
arXiv:2202.07800. Written from the formulas; the released code is Apache-2.0.

    a_i = mean over heads of the attention from CLS to patch i                 of the block itself
    keep the ceil(rate N) largest; extra token = sum over the others of a_i x_i   weights as they are, not normalised

Place: between attention and MLP of blocks 4, 7 and 10 of 12, with the rate 0.7. The extra token is an ordinary one in later
rounds: the rate counts it. CLS is not counted. If the rate keeps everything, nothing is done. The authors fine-tune with it;
`topk` is the form without the extra token. Tokens come out in raster order, not by attention: order changes nothing.
"""

from __future__ import annotations

import torch

from tokensieve.core import Reduction, View
from tokensieve.methods.places import inside_quarters
from tokensieve.methods.registry import method
from tokensieve.scoring import top


@method(
    summary="the patches that CLS attends to most, and one token for the others",
    paper='Liang et al., "Not All Patches are What You Need", ICLR, 2022, arXiv:2202.07800',
    needs=("attention",),
    selects=False,
    budget=lambda options: "70%",
    where=inside_quarters,
    extra=1,
    sums=True,
)
def evit(view: View, keep: int) -> Reduction:
    """The largest attention, and the others as one sum."""
    scores = view.coarse().float()  # (B, N)
    index = top(scores, keep)
    dropped = torch.ones_like(scores).scatter(1, index, 0.0)
    extra = (scores + 1).mul(dropped).argmax(-1, keepdim=True)  # the most attended of the others represents them
    outputs = torch.arange(keep, device=index.device).expand_as(index)
    return Reduction(
        index=torch.cat([index, extra], dim=1),
        n=view.n,
        assigned=torch.full_like(scores, keep, dtype=torch.long).scatter(1, index, outputs),
        shares=torch.where(dropped > 0, scores, 1.0),
        scores=scores,
    )
