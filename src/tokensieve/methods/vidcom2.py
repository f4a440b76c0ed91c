"""VidCom2: of a video, the tokens that are unlike the mean of their frame and of the video; unusual frames get more.

Liu et al., "Video Compression Commander: Plug-and-Play Inference Acceleration for Video Large Language Models", EMNLP 2025,
arXiv:2505.14454. Written from the rule; the released code and vLLM's are Apache-2.0.

    of the D channels the int(D/2) with the smallest variance over all tokens are used; tokens x are of unit length in them
    g(x, c) = sum of exp(-|x - c|^2 / (2 a)) over a in 1/8, 1/4, 1/2, 1, 2
    V_i = g(x_i, mean of the video),   W_i = g(x_i, mean of its frame)
    p = softmax over frames of (u - max u) / 0.01, u the mean of -V of a frame;   share = min(1, rho (1 + p - mean p))
    of each frame the max(1, round(share n)) tokens with the smallest V + W are kept

Halves are rounded to the even number. Together they are near rho N tokens, but not exactly so many (`vidcom2`). vLLM repairs
the number (`vidcom2_vllm`): it drops the tokens with the largest V + W of the whole video, or adds those with the smallest,
until there are max(frames, int(rho N)). rho is the share that the plan states, or of a number of tokens the share that it is of
N. Place: on the embeddings that the language model reads. An image is a video of one frame.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.clips import best_of_frames, by_frame, stated_share
from tokensieve.methods.places import floored_share
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision

WIDTHS = (0.125, 0.25, 0.5, 1.0, 2.0)  # a
TEMPERATURE = 0.01
PAPER = 'Liu et al., "Video Compression Commander", EMNLP, 2025, arXiv:2505.14454'


@method(
    summary="of a video, tokens unlike the mean of their frame and of the video; unusual frames get more",
    paper=PAPER,
    adaptive=True,
    budget=lambda options: "25%",
    count=floored_share,
    where=lambda depth, decoder: "llm.0" if decoder else "out",
)
def vidcom2(view: View, keep: int) -> Reduction:
    """As released: each frame has its own number."""
    scores, counts = _score(view, keep)
    return Reduction.keep_some(best_of_frames(-scores, counts), view.sizes, scores=-scores.flatten(1))


@method(
    summary="vidcom2 in vLLM's form: the number of tokens is exact",
    paper=PAPER,
    budget=lambda options: "25%",
    count=floored_share,
    where=lambda depth, decoder: "llm.0" if decoder else "out",
)
def vidcom2_vllm(view: View, keep: int) -> Reduction:
    """The tokens of `vidcom2` with the smallest V + W, or these tokens and the next ones."""
    scores, counts = _score(view, keep)
    chosen, total = best_of_frames(-scores, counts), min(view.n, max(scores.shape[1], keep))
    order = scores.flatten(1).argsort(dim=1, stable=True)
    chosen_first = (~chosen.gather(1, order)).int().argsort(dim=1, stable=True)
    return Reduction.keep(order.gather(1, chosen_first[:, :total]), view.n, scores=-scores.flatten(1))


@full_precision
def _score(view: View, keep: int) -> tuple[Tensor, Tensor]:
    """V + W of each token, (B, F, n), and how many of each frame are kept, (B, F)."""
    x = by_frame(view)
    frames, n, width = x.shape[1:]
    variance = view.tokens.float().var(dim=1, unbiased=False)  # (B, D)
    channels = variance.argsort(dim=1, stable=True)[:, : max(1, width // 2)]
    unit = F.normalize(x.gather(3, channels[:, None, None].expand(-1, frames, n, -1)), dim=-1)
    of_video = _likeness(unit, unit.mean(dim=(1, 2), keepdim=True))
    unusual = -of_video.mean(-1)  # (B, F)
    p = ((unusual - unusual.amax(1, keepdim=True)) / TEMPERATURE).softmax(1)
    share = (stated_share(view, keep) * (1 + p - p.mean(1, keepdim=True))).clamp_max(1.0)
    counts = (share * n).round().long().clamp_min(1)
    return of_video + _likeness(unit, unit.mean(dim=2, keepdim=True)), counts


def _likeness(x: Tensor, centre: Tensor) -> Tensor:
    """g, (B, F, n)."""
    squares = (x - centre).square().sum(-1)
    return torch.stack([(-squares / (2 * width)).exp() for width in WIDTHS]).sum(0)
