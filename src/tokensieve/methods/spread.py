"""Score and coverage: tokens with large scores that are not like each other.

The best K by score alone are often near-duplicates, and the rest of the image is lost. So tokens are chosen one after the
other, each time the one with the largest

    score_i + log d_i

where d_i is the squared distance of token i from the nearest chosen one (from the mean token at first), relative to the mean
squared distance from the mean. With equal scores this is farthest-point sampling.

What the coverage adds to a score only falls from one choice to the next. So with its value at the time of the choice (for
tokens that are not chosen: at the end) the K largest sums are the chosen tokens, and a soft mask over the sums becomes this
choice as it becomes hard.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tokensieve.errors import UserError, short
from tokensieve.methods.choose_apart import choose_apart
from tokensieve.methods.farthest_points import clip_factor
from tokensieve.scoring import full_precision

Choice = Literal["top", "spread"]  # the largest scores, or score and coverage

CLIP = 2.0  # norms are clipped at so many times the image's median norm, as in `cover`
MARGIN = 0.1  # of the first choice
MIN_DISTANCE = 1e-4  # the smallest relative squared distance whose logarithm is taken
FIRST_SCALE = 0.1  # of untrained scores


def check_choice(method: str, choice: str) -> None:
    """Raises a UserError for a choice that there is not."""
    if choice not in get_args(Choice):
        raise UserError(f"{method}: choice={short(choice)!r} is not one of {', '.join(get_args(Choice))}")


class StandardisedScores(nn.Module):
    """Scores (B, N) with mean 0 and deviation 1 over the tokens of an image, times a learned scale that starts small."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(FIRST_SCALE))

    def forward(self, scores: Tensor, present: Tensor | None = None) -> Tensor:
        if present is None:
            centred = scores - scores.mean(-1, keepdim=True)
            return self.scale * centred / centred.square().mean(-1, keepdim=True).add(1e-12).sqrt()
        share = present / present.sum(-1, keepdim=True)  # (B, N)
        centred = scores - (share * scores).sum(-1, keepdim=True)
        return self.scale * centred / (share * centred.square()).sum(-1, keepdim=True).add(1e-12).sqrt()


@torch.no_grad()
@full_precision
def coverage(scores: Tensor, tokens: Tensor, keep: int, present: Tensor | None = None) -> Tensor:
    """What the coverage adds to the scores (B, N) of tokens (B, N, D): (B, N).

    present: (B, N), the probability that each token is there, at a soft cut behind another one; None: all are.
    """
    x = tokens.float()
    scores = scores.float()
    if present is None:
        x = x * clip_factor(x.norm(dim=-1), CLIP)[..., None]
        x = x - x.mean(1, keepdim=True)
        square = x.square().sum(-1)  # (B, N), squared distances from the mean
        unit = square.mean(-1, keepdim=True)  # (B, 1)
    else:
        there = present.float()
        scores = scores + there.clamp_min(torch.finfo(torch.float32).tiny).log()
        x = x * clip_factor(x.norm(dim=-1), CLIP, there > 0.5)[..., None]
        share = (there / there.sum(-1, keepdim=True))[..., None]  # (B, N, 1)
        x = x - (share * x).sum(1, keepdim=True)
        square = x.square().sum(-1)
        unit = (share[..., 0] * square).sum(-1, keepdim=True)
    unit = unit.clamp_min(torch.finfo(torch.float32).tiny)
    distance = (square[:, :, None] - 2 * x @ x.transpose(1, 2) + square[:, None]) / unit[..., None]  # (B, N, N)
    logs = distance.clamp_min_(MIN_DISTANCE).log_()
    # Sums of score and coverage, if one token (row) were the only chosen one. It drops out itself, and the sums of several are
    # the least of theirs: logarithm and addition keep the order.
    itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    sums = (logs + scores[:, None]).masked_fill_(itself, -torch.inf)  # (B, N, N)
    first = (scores + (square / unit).clamp_min(MIN_DISTANCE).log()).argmax(-1)  # (B,)
    return _added(logs, choose_apart(sums, first, min(keep, x.shape[1])), scores)


def _added(logs: Tensor, order: Tensor, scores: Tensor) -> Tensor:
    """What the coverage adds, (B, N): the least of the logs (B, N, N) to the tokens chosen before, order (B, K)."""
    n = scores.shape[1]
    to_chosen = logs.gather(1, order[..., None].expand(-1, -1, n))  # (B, K, N)
    added = to_chosen.amin(1)
    earlier = to_chosen.gather(2, order[:, None].expand(-1, order.shape[1], -1)).cummin(1).values  # (B, K, K)
    added.scatter_(1, order[:, 1:], earlier.diagonal(offset=1, dim1=1, dim2=2))
    # The first token was compared with the mean, so its sum is set: a little above the largest of the others.
    first = order[:, :1]
    others = (scores + added).scatter(1, first, -torch.inf).amax(-1, keepdim=True)
    return added.scatter(1, first, others + MARGIN - scores.gather(1, first))
