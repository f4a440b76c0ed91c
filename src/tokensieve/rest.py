"""What becomes of the tokens that a selecting method did not choose: an option of every such method, written once."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.scoring import cosine

RESTS = {
    "drop": "they are gone",
    "merge": "each joins its most similar kept token (cosine), by size-weighted mean",
    "fuse": "all become one extra token, weighted by the softmax of their scores",
    "zero": "their places stay and hold 0 (only @out, where nothing runs on them any more)",
}


def settle(view: View, chosen: Reduction, rest: str) -> Reduction:
    """A selection and its rest as one reduction ('zero' changes how the selection is applied, not what is selected)."""
    if rest == "zero" or chosen.k == chosen.n:
        return chosen
    settled = chosen
    if rest != "drop":
        plain = replace(chosen, gate=None)
        settled = replace(_merge(view, plain) if rest == "merge" else _fuse(view, plain), anchors=chosen.anchors)
    return settled if chosen.gate is None else _gated(view, settled, chosen.gate)


def _gated(view: View, settled: Reduction, gate: Tensor) -> Reduction:
    """The gate as a factor of the sizes: how often later attention and pooling count a token.

    As a factor of the token itself it would be all but undone by the norm before the next block, and teach nothing.
    """
    sizes = settled.carry_sizes(view.size())
    assert sizes is not None
    return replace(settled, gate=None, sizes=sizes * F.pad(gate, (0, settled.k - gate.shape[1]), value=1.0))


def _merge(view: View, chosen: Reduction) -> Reduction:
    nearest = cosine(view.tokens, chosen.apply(view.tokens)).argmax(-1)  # (B, N)
    places = torch.arange(chosen.k, device=nearest.device).expand_as(chosen.index)
    groups = nearest.scatter(1, chosen.index, places)  # a kept token joins itself
    return Reduction.merge(groups, chosen.index, view.size(), chosen.scores)


def _fuse(view: View, chosen: Reduction) -> Reduction:
    """The rest as one token: softmax of its scores, each token counted as often as it stands for patches."""
    sizes = view.size()
    left = torch.ones_like(sizes).scatter(1, chosen.index, 0.0)  # (B, N), 1 where not chosen
    scores = torch.zeros_like(sizes) if chosen.scores is None else chosen.scores.float()
    share = (scores + (sizes * left).log()).softmax(-1)  # (B, N), 0 where chosen
    extra = share.argmax(-1, keepdim=True)  # (B, 1), the weightiest of the rest stands for it
    return Reduction(
        index=torch.cat([chosen.index, extra], dim=1),
        n=chosen.n,
        weight=torch.cat([chosen.as_weight(), share[:, None]], dim=1),
        sizes=torch.cat([sizes.gather(1, chosen.index), (sizes * left).sum(-1, keepdim=True)], dim=1),
        scores=chosen.scores,
    )
