"""V-CAST: of a video, tokens unlike their frame and long ones; frames where the video turns get more.

"V-CAST", 2026, arXiv:2603.27650. Written from the rule; the released code is MIT.

    z_f = unit(mean token of frame f)
    c_f = 1 - cos(z_f - z_{f-1}, z_{f+1} - z_f),   1 for the first and the last frame;   w = softmax over frames of c / 0.7
    B = max(F, round(rho N)) tokens: one of each frame, and floor(w_f (B - F)) more, at most n in all. What is left over goes
        to the frame with the largest fraction until it is full, then to the next (as released; not one token to each)
    of each frame the tokens with the largest (1 - cos(x, z_f)) + minmax(|x|) of the frame are kept

Place: on the embeddings that the language model reads, positions stay the original ones. An image, which the authors leave
as it is, is a video of one frame.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.clips import best_of_frames, by_frame
from tokensieve.methods.places import rounded_share
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, positions

TEMPERATURE = 0.7
TINY = 1e-6  # of norms and ranges, as released
ROUNDING = 1e-9  # below a whole number: of a still clip 1/F times a multiple of F is that whole number


@method(
    summary="of a video, tokens unlike their frame and long ones; frames where the video turns get more",
    paper='"V-CAST", 2026, arXiv:2603.27650',
    budget=lambda options: "25%",
    count=rounded_share,
    where=lambda depth, decoder: "llm.0" if decoder else "out",
    no_graph="how many tokens of a frame are kept is computed in Python",
)
@full_precision
def vcast(view: View, keep: int) -> Reduction:
    x = by_frame(view)
    frames, n = x.shape[1:3]
    total = min(view.n, max(frames, keep))
    centre = F.normalize(x.mean(2), dim=-1, eps=TINY)  # (B, F, D)
    weight = (_curvature(centre).cpu().double() / TEMPERATURE).softmax(-1)  # (B, F)
    counts = torch.tensor([_share_out(row, total, n) for row in weight.tolist()], device=x.device)
    length = x.norm(dim=-1)  # (B, F, n)
    low, high = length.amin(-1, keepdim=True), length.amax(-1, keepdim=True)
    scores = 1 - F.cosine_similarity(x, centre[:, :, None], dim=-1, eps=TINY) + (length - low) / (high - low + TINY)
    return Reduction.keep(positions(best_of_frames(scores, counts), total), view.n, scores=scores.flatten(1))


def _curvature(centre: Tensor) -> Tensor:
    """How much the video turns at each frame, (B, F, D) -> (B, F)."""
    steps = centre.diff(dim=1)
    inside = 1 - F.cosine_similarity(steps[:, :-1], steps[:, 1:], dim=-1, eps=TINY)
    return F.pad(inside, (1, 1), value=1.0)[:, : centre.shape[1]]


def _share_out(weight: list[float], total: int, n: int) -> list[int]:
    """Tokens of each frame of n."""
    exact = [each * (total - len(weight)) for each in weight]
    whole = [int(each + ROUNDING) for each in exact]
    counts = [1 + min(each, n - 1) for each in whole]
    for frame in sorted(range(len(weight)), key=lambda frame: whole[frame] - exact[frame]):
        counts[frame] += min(n - counts[frame], total - sum(counts))
    return counts
