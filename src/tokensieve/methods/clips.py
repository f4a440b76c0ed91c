"""What methods for videos share: the tokens frame by frame, the choice in each frame, and the parting into segments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import View


def by_frame(view: View) -> Tensor:
    """The tokens in float32, (B, F, n, D)."""
    frames, h, w = view.video_grid()
    tokens: Tensor = view.tokens.float().unflatten(1, (frames, h * w))
    return tokens


def attention_by_frame(view: View, received: bool = False) -> Tensor:
    """How much each token is attended to, (B, F, n), as `View.coarse`; received: by all tokens, where a tower says so.

    In a language model the last word attends: what all tokens say there would take N x N products.
    """
    assert view.attention is not None
    scores = view.attention.received() if received and not view.place.startswith("llm") else view.coarse()
    by_frames: Tensor = scores.float().unflatten(1, (view.video_grid()[0], -1))
    return by_frames


def stated_share(view: View, keep: int) -> float:
    """rho: the share of the tokens that the plan states, which no number of tokens has rounded; or that of a number."""
    return keep / view.n if view.share is None else float(view.share)


def best_of_frames(scores: Tensor, counts: Tensor) -> Tensor:
    """The tokens with the largest scores (B, F, n) of each frame, so many (B, F): True where chosen, (B, N). Of equal ones the
    first."""
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (rank < counts[..., None]).flatten(1)


def segments(frames: Tensor, least: int, similar: float) -> list[range]:
    """Frames (F, D) in segments: parted where neighbours have a cosine below `similar`, but in `least` segments if there are so
    many frames, by the smallest cosines."""
    unit = F.normalize(frames, dim=-1)
    cosines = (unit[1:] * unit[:-1]).sum(-1)  # (F - 1,)
    cuts = max(min(least - 1, len(cosines)), int((cosines < similar).sum()))
    ends = cosines.argsort(stable=True)[:cuts].sort().values.tolist()
    starts = [0, *(end + 1 for end in ends)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(frames)], strict=True)]


def in_order(index: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of one video in the order of their tokens: index (K,) and groups (N,), -1: dropped, renumbered."""
    index, order = index.sort()
    number = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return index, torch.where(groups < 0, -1, number[groups.clamp_min(0)])
