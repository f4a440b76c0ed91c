"""FastVID: of a video in segments, the most attended tokens of each frame, and anchors that the others of a segment go into.

Shen et al., "FastVID: Dynamic Density Pruning for Fast Video Large Language Models", NeurIPS 2025, arXiv:2503.11187. Written
from the rules; the released code is MIT.

    segments: parted at the 7 smallest cosines of neighbouring frame vectors, and wherever one is below 0.9
    of each frame m = int(rho n) tokens are due: m - int(0.4 m) are the most attended ones, q = int(0.4 m) are for anchors
    of the others: s = density * distance to the next denser one (DPC-KNN in the frame, 4 neighbours)
    of a segment of l frames, every 4th from its end has floor(q l / ceil(l / 4)) anchors, the largest s
    all others of the segment (anchors too) go to the most similar anchor of each of these frames
    anchor <- w anchor + (1 - w) mean of those, w = max(0.6, 1 / (their number + 1))

Place: before layer 0 of the language model, positions stay. The authors' frame vectors and attention are those of SigLIP's
pooling head. Here a frame vector is the mean token weighted by the attention, which is that of the pooling query, of CLS, or
in a language model of the last word. A token may go into several anchors, so the reduction is a dense matrix of outputs times
tokens: 4 rho N^2 bytes of each video, 63 MB for 64 frames of 196 tokens at 10 %, 1 GB for 256. An image is a video of one
frame.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.clips import attention_by_frame, by_frame, segments
from tokensieve.methods.density_peaks import density_and_gap
from tokensieve.methods.places import floored_share
from tokensieve.methods.registry import method
from tokensieve.scoring import cosine, full_precision

SEGMENTS, SIMILAR = 8, 0.9
FOR_ANCHORS = 0.4  # of the tokens of a frame
EVERY = 4  # one frame with anchors of so many
NEIGHBOURS = 4
LEAST_WEIGHT = 0.6  # of an anchor


@method(
    summary="of a video, the most attended tokens, and anchors in some frames that the others of a segment go into",
    paper='Shen et al., "FastVID", NeurIPS, 2025, arXiv:2503.11187',
    needs=("attention",),
    selects=False,
    adaptive=True,
    budget=lambda options: "10%",
    count=floored_share,
    where=lambda depth, decoder: "llm.0" if decoder else "out",
)
@full_precision
def fastvid(view: View, keep: int) -> Reduction:
    videos = zip(by_frame(view), attention_by_frame(view), strict=True)
    return Reduction.stack([_reduce(x, scores, max(1, keep // len(x))) for x, scores in videos])


def _reduce(x: Tensor, attention: Tensor, due: int) -> Reduction:
    """Of one video: x (F, n, D), attention (F, n), tokens that are due of each frame."""
    frames, n = attention.shape
    for_anchors = int(due * FOR_ANCHORS)
    order = attention.argsort(dim=1, descending=True, stable=True)
    first = n * torch.arange(frames, device=x.device)[:, None]  # (F, 1)
    kept, others = (part.sort(dim=1).values for part in order.split([due - for_anchors, n - due + for_anchors], dim=1))
    index = [(kept + first).flatten()]
    rows = [torch.zeros((len(index[0]), frames * n), device=x.device).scatter(1, index[0][:, None], 1.0)]
    if for_anchors:
        rest = x.gather(1, others[..., None].expand(-1, -1, x.shape[2]))  # (F, n', D)
        density, gap = density_and_gap(rest, NEIGHBOURS)
        weights = attention / attention.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        for segment in segments((weights[..., None] * x).sum(1), SEGMENTS, SIMILAR):
            frames_with = range(segment.stop - 1, segment.start - 1, -EVERY)
            count = min(rest.shape[1], for_anchors * len(segment) // len(frames_with))
            inside = slice(segment.start, segment.stop)
            members = (others + first)[inside].flatten()  # (l n',)
            for frame in frames_with:
                best = (density * gap)[frame].argsort(descending=True, stable=True)[:count]
                anchors = others[frame, best] + frame * n
                rows.append(_mix(rest[inside].flatten(0, 1), rest[frame, best], members, anchors, frames * n))
                index.append(anchors)
    at, in_order = torch.cat(index).sort()
    return Reduction(at[None], frames * n, weight=torch.cat(rows)[in_order][None])


def _mix(tokens: Tensor, anchors: Tensor, at: Tensor, anchors_at: Tensor, n: int) -> Tensor:
    """The weights (A, N) of anchors (A, D), which are the tokens anchors_at, with their most similar tokens (M, D), at `at`."""
    nearest = cosine(tokens[None], anchors[None])[0].argmax(1)  # (M,)
    count = torch.bincount(nearest, minlength=len(anchors)).float()  # (A,)
    weight = torch.maximum(1 / (count + 1), torch.full_like(count, LEAST_WEIGHT)).masked_fill(count == 0, 1.0)
    rows = torch.zeros((len(anchors), n), device=tokens.device)
    rows[nearest, at] = ((1 - weight) / count.clamp_min(1))[nearest]
    return rows.scatter_add(1, anchors_at[:, None], weight[:, None])
