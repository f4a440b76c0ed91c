"""What every cut of a plan did to the patches of one image: their states, groups, scores and shares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tokensieve.core import Reduction
from tokensieve.errors import UserError

if TYPE_CHECKING:
    from tokensieve.cutting.handle import Handle


# States of a patch at a cut: dropped earlier, dropped here, or kept. Where a method selects patches and then mixes all of them
# in each of its tokens, the selected ones are MIXED, and those that it sums up in one more token are FOLDED.
GONE, DROPPED, MERGED, PICKED, ANCHOR, FOLDED, MIXED = range(7)


@dataclass(frozen=True)
class Stage:
    """One cut, in terms of the N patches of the original grid."""

    layer: str  # as in the ledger: "4", "4.attn" or "out"
    tokens_in: int
    tokens_out: int
    states: np.ndarray  # (N,), GONE to MIXED; a merged token is PICKED or ANCHOR at the patch that represents it
    groups: np.ndarray  # (N,), the output token that each patch is part of, -1 where it is dropped
    scores: np.ndarray | None  # (N,), of the token that each patch was part of before the cut; NaN if dropped earlier
    shares: np.ndarray | None = None  # (N,), of each patch in the mean of all tokens, for methods that mix patches
    colours: np.ndarray | None = None  # (N,) as `panels.tints` makes them, "" where a patch is alone; None: not chosen yet

    def of(self, tokens: np.ndarray) -> Stage:
        """Of these tokens alone, in the order in which they are drawn."""
        chosen = {name: getattr(self, name) for name in ("states", "groups", "scores", "shares", "colours")}
        parts: dict[str, Any] = {name: None if values is None else values[tokens] for name, values in chosen.items()}
        return replace(self, **parts)

    @property
    def joint(self) -> np.ndarray:
        """(N,), whether a patch is merged with others into one token."""
        if self.colours is not None:  # those of a single frame, whose others may be in other frames
            return self.colours != ""
        if self.shares is not None:
            return np.zeros(len(self.groups), dtype=bool)
        sizes = np.bincount(self.groups[self.groups >= 0], minlength=self.tokens_out)
        return (self.groups >= 0) & (sizes[self.groups] > 1)


def stages(handle: Handle, batch_index: int = 0) -> list[Stage]:
    """Every cut of the handle's last batch for one of its images, in order."""
    cuts: list[Stage] = []
    samples = handle.samples
    if samples is not None and any(len(batched.index) < len(samples) for _, batched in handle.stages):
        raise UserError(
            "the images of the last batch have different numbers of tokens, of which a handle records some only; run the model "
            "with this image alone"
        )
    if handle.stages and handle.reduction is None and all(batched.counts is None for _, batched in handle.stages):
        raise UserError("patch dropout left no grid to draw; call model.eval() and run the batch again")
    before: Reduction | None = None
    for layer, batched in handle.stages:
        reduction = _of_one(batched, batch_index)
        n = before.n if before is not None else reduction.n
        arrived = before.groups[0] if before is not None else torch.arange(n)  # (N,), the token that each patch is part of
        heads = before.index[0] if before is not None else torch.arange(n)  # (tokens,), the patch that represents each
        after = reduction if before is None else before.then(reduction)
        states = torch.full((n,), DROPPED)
        states[after.groups[0] >= 0] = MERGED
        states[arrived < 0] = GONE
        states[after.index[0]] = PICKED
        if reduction.anchors is not None:
            kept = reduction.anchors[0][torch.isin(reduction.anchors[0], reduction.index[0])]
            states[heads[kept]] = ANCHOR
        shares = None
        if (mixture := _mixture(reduction)) is not None:
            rows = after.as_weight()[0]  # (tokens, N)
            states = torch.where(rows.sum(0) > 0, FOLDED, DROPPED)
            states[torch.isin(arrived, mixture)] = MIXED
            states[arrived < 0] = GONE
            shares = rows.mean(0).numpy()
        scores = None
        if reduction.scores is not None:
            scores = reduction.scores[0].float()[arrived.clamp_min(0)].masked_fill(arrived < 0, torch.nan).numpy()
        cuts.append(Stage(layer, reduction.n, reduction.k, states.numpy(), after.groups[0].numpy(), scores, shares))
        before = after
    return cuts


def _mixture(reduction: Reduction) -> torch.Tensor | None:
    """The tokens (A,) that a method selected and then mixed, each into several new tokens; None for other methods."""
    if reduction.weight is None or reduction.anchors is None or not ((reduction.weight[0] > 0).sum(0) > 1).any():
        return None
    return reduction.anchors[0]


def _of_one(reduction: Reduction, number: int) -> Reduction:
    """The reduction of a single image of the batch, on the CPU."""
    if not -len(reduction.index) <= number < len(reduction.index):
        raise UserError(f"batch_index {number}: the last batch had {len(reduction.index)} images")
    tensors: dict[str, Any] = {name: value for name, value in vars(reduction).items() if isinstance(value, torch.Tensor)}
    return replace(reduction, **{name: value[number][None].detach().cpu() for name, value in tensors.items()})
