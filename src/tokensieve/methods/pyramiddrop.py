"""PyramidDrop: at three depths of the language model, the vision tokens that the last word attends to least are dropped.

Xing et al., "PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy Reduction", CVPR 2025,
arXiv:2410.17247. Written from the formulas; the released code is Apache-2.0.

    before layers 8, 16 and 24 of 32: that layer's own norm, queries and keys on the current states
    score = mean over heads of the attention from the last token of the instruction
    int(N ratio) of the original N tokens are kept, in their order; ratios 0.5, 0.25, 0.125

`pyramiddrop` keeps half of what arrives at each of the three depths; `pyramiddrop:30%` keeps 30, 9 and 2.7 % of the original
tokens. The released code numbers positions anew behind a cut; here tokens keep theirs. A number of tokens is the same at every
depth.
"""

from __future__ import annotations

from tokensieve.core import Reduction, View
from tokensieve.methods.places import decoder_quarters, powers_of_share
from tokensieve.methods.registry import method
from tokensieve.scoring import top


@method(
    summary="in the language model at three depths, the vision tokens that the last word attends to most",
    paper='Xing et al., "PyramidDrop", CVPR, 2025, arXiv:2410.17247',
    needs=("attention",),
    budget=lambda options: "50%",
    where=decoder_quarters,
    count=powers_of_share,
)
def pyramiddrop(view: View, keep: int) -> Reduction:
    """The largest attention of the last row."""
    scores = view.coarse().float()
    return Reduction.keep(top(scores, keep), view.n, scores=scores)
