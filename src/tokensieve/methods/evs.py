"""EVS: of a video, the tokens that differ most from the same place one frame before are kept.

Efficient Video Sampling, NVIDIA 2025, arXiv:2510.14624, as in vLLM's multimodal/video_prune/evs.py (Apache-2.0). Written from
its rule.

    d_{t,i} = 1 - cos(x_{t,i}, x_{t-1,i})        the first frame is always kept
    the tokens with the largest d are kept       of all frames together; of equal ones the first

Place: on the embeddings that the language model reads (@llm.0), or the tower's output. The authors keep
max(tokens of a frame, int(N (1 - q))) tokens, so a smaller budget keeps one whole frame, and a video of one frame stays whole.
Positions stay the original ones. Frames are those of `view.grid`, (frames, h, w). Of an image, (h, w), the first `keep` tokens
in raster order stay, which is no useful choice; use it for videos.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tokensieve.core import Reduction, View
from tokensieve.methods.places import floored_share
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, top


@method(
    summary="of a video, the tokens that differ most from the same place one frame before",
    paper="Efficient Video Sampling, NVIDIA, 2025, arXiv:2510.14624",
    budget=lambda options: "50%",
    count=floored_share,
    where=lambda depth, decoder: "llm.0" if decoder else "out",
)
@full_precision
def evs(view: View, keep: int) -> Reduction:
    """The first frame, then the largest differences to the frame before."""
    frames = view.video_grid()[0]
    unit = F.normalize(view.tokens.float(), dim=-1).unflatten(1, (frames, -1))  # (B, F, n, D)
    change = 1 - (unit[:, 1:] * unit[:, :-1]).sum(-1)  # (B, F-1, n)
    first = torch.full_like(unit[:, :1, :, 0], torch.inf)  # (B, 1, n)
    scores = torch.cat([first, change], dim=1).flatten(1)  # (B, N)
    if view.grid is not None and len(view.grid) == 3:
        keep = max(keep, view.n // frames)
    return Reduction.keep(top(scores, keep), view.n, scores=scores.nan_to_num(posinf=3.0))
