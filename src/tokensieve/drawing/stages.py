"""TODO docstring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tokensieve.core import Reduction
from tokensieve.errors import UserError

if TYPE_CHECKING:
    from tokensieve.cutting.handle import Handle


# States of a patch at a cut: lost earlier, lost here, or going on. Where a method chooses patches and then mixes all of them in
# each of its tokens, those that it chose are MIXED, and those that it sums up in one more token are FOLDED.
GONE, DROPPED, MERGED, PICKED, ANCHOR, FOLDED, MIXED = range(7)


@dataclass(frozen=True)
class Stage:
    """One cut, told of the N patches of the original raster."""

    layer: str  # as in the ledger: "4", "4.attn" or "out"
    tokens_in: int
    tokens_out: int
    states: np.ndarray  # (N,), GONE ... ANCHOR; a merged token is PICKED or ANCHOR at the patch that stands for it
    groups: np.ndarray  # (N,), the output token each patch is part of, -1 where it is lost
    scores: np.ndarray | None  # (N,), of the token that each patch was part of before the cut; NaN where it was lost by then
    shares: np.ndarray | None = None  # (N,), of each patch in the mean of all tokens, where every token mixes many patches

    @property
    def joint(self) -> np.ndarray:
        """(N,), whether a patch goes on together with others, in one group of them."""
        if self.shares is not None:
            return np.zeros(len(self.groups), dtype=bool)
        sizes = np.bincount(self.groups[self.groups >= 0], minlength=self.tokens_out)
        return (self.groups >= 0) & (sizes[self.groups] > 1)


def stages(handle: Handle, batch_index: int = 0) -> list[Stage]:
    """Every cut of the handle's last batch for one of its images, in order."""
    made: list[Stage] = []
    if handle.stages and handle.reduction is None:
        raise UserError("patch dropout left no raster to draw in; call model.eval() and run the batch again")
    before: Reduction | None = None
    for layer, batched in handle.stages:
        here = _of_one(batched, batch_index)
        n = before.n if before is not None else here.n
        arrived = before.groups[0] if before is not None else torch.arange(n)  # (N,), the token that each patch is part of
        standing = before.index[0] if before is not None else torch.arange(n)  # (tokens,), the patch that stands for each
        after = here if before is None else before.then(here)
        states = torch.full((n,), DROPPED)
        states[after.groups[0] >= 0] = MERGED
        states[arrived < 0] = GONE
        states[after.index[0]] = PICKED
        if here.anchors is not None:
            kept = here.anchors[0][torch.isin(here.anchors[0], here.index[0])]
            states[standing[kept]] = ANCHOR
        shares = None
        if (mixture := _mixture(here)) is not None:
            rows = after.as_weight()[0]  # (tokens, N)
            states = torch.where(rows.sum(0) > 0, FOLDED, DROPPED)
            states[torch.isin(arrived, mixture)] = MIXED
            states[arrived < 0] = GONE
            shares = rows.mean(0).numpy()
        scores = None
        if here.scores is not None:
            scores = here.scores[0].float()[arrived.clamp_min(0)].masked_fill(arrived < 0, torch.nan).numpy()
        made.append(Stage(layer, here.n, here.k, states.numpy(), after.groups[0].numpy(), scores, shares))
        before = after
    return made


def _mixture(reduction: Reduction) -> torch.Tensor | None:
    """The tokens (A,) that a method chose before it mixed them, where it did: every one is part of several new tokens."""
    if reduction.weight is None or reduction.anchors is None or not ((reduction.weight[0] > 0).sum(0) > 1).any():
        return None
    return reduction.anchors[0]


def _of_one(reduction: Reduction, number: int) -> Reduction:
    """The reduction of a single image of the batch, on the CPU."""
    if not -len(reduction.index) <= number < len(reduction.index):
        raise UserError(f"batch_index {number}: the last batch had {len(reduction.index)} images")
    tensors: dict[str, Any] = {name: value for name, value in vars(reduction).items() if isinstance(value, torch.Tensor)}
    return replace(reduction, **{name: value[number][None].detach().cpu() for name, value in tensors.items()})
