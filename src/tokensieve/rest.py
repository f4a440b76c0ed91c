"""What becomes of the tokens that a selecting method did not choose: an option of every such method, written once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.scoring import cosine

RESTS = {
    "drop": "they are gone",
    "merge": "each joins its most similar kept token (cosine), by size-weighted mean",
    "fuse": "all become one extra token, weighted by the softmax of their scores",
    "zero": "their places stay and hold 0 (only @out, where nothing runs on them any more)",
}


def apply_rest(view: View, chosen: Reduction, rest: str) -> Reduction:
    """A selection and its rest as one reduction ('zero' changes how the selection is applied, not what is selected)."""
    if rest == "zero" or chosen.k == chosen.n:
        return chosen
    plain = replace(chosen, gate=None)
    settled = plain
    if rest != "drop":
        settled = replace(_merge(view, plain) if rest == "merge" else _fuse(view, plain), anchors=chosen.anchors)
    return settled if chosen.gate is None else _gated(view, plain, settled, chosen.gate)


def _gated(view: View, chosen: Reduction, settled: Reduction, gate: Tensor) -> Reduction:
    """The gate (B, K), which is 1, stands between each chosen token and what there would be in its place, were it not chosen.

    With merge that is the chosen token most similar to it, with fuse the extra token, with drop nothing: there the gate is a
    factor of its size. (As a factor of the token itself it would be undone by the norm before the next block.)
    """
    rows = settled.weight
    if rows is None:
        return replace(settled, sizes=view.sizes_or_ones().gather(1, settled.index) * gate)
    k = chosen.k
    if settled.k > k:
        instead = rows[:, k:]  # (B, 1, N)
    else:
        kept = chosen.apply(view.tokens)
        alike = cosine(kept, kept) - 3 * torch.eye(k, device=kept.device)  # nobody stands in for himself
        instead = rows.gather(1, alike.argmax(-1)[..., None].expand_as(rows))  # (B, K, N)
    own = rows[:, :k] + (gate - 1)[..., None] * (rows[:, :k] - instead)
    return replace(settled, weight=torch.cat([own, rows[:, k:]], dim=1))


def _merge(view: View, chosen: Reduction) -> Reduction:
    nearest = cosine(view.tokens, chosen.apply(view.tokens)).argmax(-1)  # (B, N)
    places = torch.arange(chosen.k, device=nearest.device).expand_as(chosen.index)
    groups = nearest.scatter(1, chosen.index, places)  # a kept token joins itself
    return Reduction.merge(groups, chosen.index, view.sizes_or_ones(), chosen.scores)


def _fuse(view: View, chosen: Reduction) -> Reduction:
    """The rest as one token: softmax of its scores, each token counted as often as it stands for patches."""
    sizes = view.sizes_or_ones()
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
