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
        there = torch.ones_like(scores) if present is None else present
        share = there / there.sum(-1, keepdim=True)  # (B, N)
        centred = scores - (share * scores).sum(-1, keepdim=True)
        return self.scale * centred / (share * centred.square()).sum(-1, keepdim=True).add(1e-12).sqrt()


@torch.no_grad()
@full_precision
def coverage(scores: Tensor, tokens: Tensor, keep: int, present: Tensor | None = None) -> Tensor:
    """What the coverage adds to the scores (B, N) of tokens (B, N, D): (B, N).

    present: (B, N), the probability that each token is there, at a soft cut behind another one; None: all are.
    """
    x = tokens.float()
    there = torch.ones_like(scores, dtype=torch.float32) if present is None else present.float()
    scores = scores.float() + there.clamp_min(torch.finfo(torch.float32).tiny).log()
    x = x * clip_factor(x.norm(dim=-1), CLIP, there > 0.5)[..., None]
    share = (there / there.sum(-1, keepdim=True))[..., None]  # (B, N, 1)
    x = x - (share * x).sum(1, keepdim=True)
    square = x.square().sum(-1)  # (B, N), squared distances from the mean
    unit = (share[..., 0] * square).sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)  # (B, 1)
    distance = (square[:, :, None] - 2 * x @ x.transpose(1, 2) + square[:, None]) / unit[..., None]  # (B, N, N)
    image = torch.arange(len(x), device=x.device)
    is_chosen = torch.zeros_like(square, dtype=torch.bool)
    nearest, first = square / unit, image
    for number in range(min(keep, x.shape[1])):
        sums = (scores + nearest.clamp_min(MIN_DISTANCE).log()).masked_fill(is_chosen, -torch.inf)  # (B, N)
        chosen = sums.argmax(-1)  # (B,)
        is_chosen[image, chosen] = True
        if number == 0:
            first, nearest = chosen, distance[image, chosen]
        else:
            nearest = torch.where(is_chosen, nearest, torch.minimum(nearest, distance[image, chosen]))
    added = nearest.clamp_min(MIN_DISTANCE).log()
    # The first token was compared with the mean, so its sum is set: a little above the largest of the others.
    others = (scores + added).scatter(1, first[:, None], -torch.inf).amax(-1)
    added[image, first] = others + MARGIN - scores[image, first]
    return added
