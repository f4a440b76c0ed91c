"""The options that every selecting or merging method has: how the tokens are handled that are not selected (`rest`), and how
tokens are merged (`norm`, `sizes`)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.scoring import cosine, most_similar

RESTS = {
    "drop": "they are removed",
    "merge": "each is merged into the most similar kept token (cosine), by size-weighted mean",
    "fuse": "all are merged into one extra token, weighted by the softmax of their scores",
    "zero": "they are set to 0 and keep their positions (only @out)",
}


RAGGED_RESTS = ("drop", "merge")  # where images are left with different numbers of tokens
MERGE_OPTIONS = ("norm", "sizes")


def with_merge_options(view: View, reduction: Reduction, norm: float, sizes: str) -> Reduction:
    """A merge that restores norms with the power `norm`, and whose tokens count as one each if `sizes` is "no"."""
    if sizes == "no":
        ones = None if view.sizes is None else torch.ones_like(view.sizes[:, : reduction.k])  # None: one each already
        return replace(reduction, norm=norm, sizes=ones if reduction.counts is None else reduction.is_real().float())
    return replace(reduction, norm=norm)


def apply_rest(view: View, chosen: Reduction, rest: str) -> Reduction:
    """A selection and its rest as one reduction. 'zero' changes how the selection is applied, not the selection."""
    if chosen.soft is not None:
        return _apply_rest_softly(view, chosen, chosen.soft, rest)
    if rest == "zero" or (chosen.k == chosen.n and chosen.counts is None):
        return chosen
    plain = chosen if chosen.gate is None else replace(chosen, gate=None)
    with_rest = plain
    if rest != "drop":
        with_rest = replace(_merge(view, plain) if rest == "merge" else _fuse(view, plain), anchors=chosen.anchors)
    return with_rest if chosen.gate is None else _gated(view, plain, with_rest, chosen.gate)


def _gated(view: View, chosen: Reduction, with_rest: Reduction, gate: Tensor) -> Reduction:
    """Applies the gate (B, K), whose value is 1: it interpolates between each kept token and what would replace it.

    With merge that is the most similar kept token, with fuse the extra token. With drop there is none, and the gate is a factor
    of the token's size. (A factor of the token itself would be undone by the norm before the next block.)
    """
    if with_rest.assigned is None:
        return replace(with_rest, sizes=view.sizes_or_ones().gather(1, with_rest.index) * gate)
    k = chosen.k
    if with_rest.k > k:
        gate = torch.nn.functional.pad(gate, (0, 1), value=1.0)  # of the extra token too
        return replace(with_rest, gate=gate, stand_in=torch.full_like(with_rest.index, k))
    kept = chosen.apply(view.tokens)
    similarity = cosine(kept, kept) - 3 * torch.eye(k, device=kept.device)  # a token does not replace itself
    return replace(with_rest, gate=gate, stand_in=similarity.argmax(-1))


def _merge(view: View, chosen: Reduction) -> Reduction:
    kept = chosen.apply(view.tokens)
    outputs = torch.arange(chosen.k, device=kept.device).expand_as(chosen.index)
    if chosen.counts is None:
        groups = most_similar(view.tokens, kept).scatter(1, chosen.index, outputs)  # a kept token stays in its own group
        return Reduction.merge(groups, chosen.index, view.sizes_or_ones(), chosen.scores)
    real = chosen.is_real()
    nearest = cosine(view.tokens, kept).masked_fill(~real[:, None], -2.0).argmax(-1)  # (B, N), no token joins padding
    groups = nearest.scatter(1, chosen.index, torch.where(real, outputs, nearest.gather(1, chosen.index)))
    return replace(Reduction.merge(groups, chosen.index, view.sizes_or_ones(), chosen.scores), counts=chosen.counts)


def _apply_rest_softly(view: View, chosen: Reduction, soft: Tensor, rest: str) -> Reduction:
    """A soft choice and its rest. With merge, the share 1 - soft of a token moves to the most similar other kept token.

    Every token stays in its place, so the reduction is from N to N tokens. Its sizes are those of tokens that are there for
    sure; the engine multiplies them by the probability of being there.
    """
    if rest == "drop":
        return chosen
    if rest != "merge":
        raise UserError(f"rest={rest} has no soft form, which the training needs; use rest=drop or rest=merge")
    index, sizes = chosen.index, view.sizes_or_ones()
    present = torch.ones_like(sizes) if view.present is None else view.present
    kept = view.tokens.gather(1, index[..., None].expand(-1, -1, view.tokens.shape[2]))  # (B, K, D)
    positions = torch.arange(view.n, device=index.device)
    itself = positions[:, None] == index[:, None]  # (B, N, K)
    nearest = cosine(view.tokens, kept).masked_fill(itself, -2.0).argmax(-1)  # (B, N)
    goal = index.gather(1, nearest)[:, None]  # (B, 1, N); a single kept token is its own
    moving = (sizes * present * (1 - soft))[:, None]  # (B, 1, N)
    left = (present * soft).clamp_min(torch.finfo(torch.float32).tiny)  # (B, N)
    arriving = torch.zeros_like(moving).expand(-1, view.n, -1).scatter(1, goal, moving)  # (B, N, N)
    mass = arriving / left[..., None] + torch.diag_embed(sizes)
    total = mass.sum(-1)  # (B, N)
    return replace(chosen, index=positions.expand(len(index), -1), weight=mass / total[..., None], sizes=total)


def _fuse(view: View, chosen: Reduction) -> Reduction:
    """The rest as one token: softmax of the scores, each token weighted by its size."""
    sizes = view.sizes_or_ones()
    left = torch.ones_like(sizes).scatter(1, chosen.index, 0.0)  # (B, N), 1 where not chosen
    scores = torch.zeros_like(sizes) if chosen.scores is None else chosen.scores.float()
    share = (scores + (sizes * left).log()).softmax(-1)  # (B, N), 0 where chosen
    extra = share.argmax(-1, keepdim=True)  # (B, 1), the token with the largest weight represents the rest
    outputs = torch.arange(chosen.k, device=share.device).expand_as(chosen.index)
    return Reduction(
        index=torch.cat([chosen.index, extra], dim=1),
        n=chosen.n,
        assigned=torch.full_like(share, chosen.k, dtype=torch.long).scatter(1, chosen.index, outputs),
        shares=share + (1 - left),
        sizes=torch.cat([sizes.gather(1, chosen.index), (sizes * left).sum(-1, keepdim=True)], dim=1),
        scores=chosen.scores,
    )
