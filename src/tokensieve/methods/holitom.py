"""HoliTom: of a video, places that do not change for a while become one token; what is left is cut by attention.

Shao et al., "HoliTom: Holistic Token Merging for Fast Video Large Language Models", NeurIPS 2025, arXiv:2505.21334. Written
from the rules; the released code is Apache-2.0.

    place i is static from frame f to f+1 if cos(x_{f,i}, x_{f+1,i}) > tau
    gain of a window of frames s..e = (places static all through it) * (e - s); the windows have the largest sum R of gains
    rho' = min(1, rho / (1 - R / N)); rho is the share that the plan states, or that a number of tokens is of N
    in a window: static places become their mean over its frames, and of these n_s the round(rho' n_s) density peaks stay
        (DPC-KNN, 7 neighbours); peak <- beta peak + (1 - beta) mean of the others of its cluster
    of the other n_d tokens of each frame m = ceil(rho' n_d) stay: the round((1 - density) m) most attended, and as many density
        peaks of what is left (with as many neighbours as peaks, at most 7), mixed with their clusters in the same way

Together they are near rho N tokens. Released are density=0, so that attention alone chooses, and tau=0.8, but tau=0.65 at 10 %.
Place: the language model's input; the authors take the attention that tokens receive in the tower's last block. In a language
model it is that of the last word. The authors merge once more inside the language model: `fastv@llm.18:50%(rest=merge)` is like
it. Of equal sums shorter windows are taken, and ties of densities are broken by position instead of noise. Outputs stand in the
order of their tokens in the video; the released code goes window by window, the static places first. An image is a video of one
frame, of which the most attended tokens stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.clips import attention_by_frame, by_frame, in_order, stated_share
from tokensieve.methods.density_peaks import density_peaks
from tokensieve.methods.places import floored_share
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision

NEIGHBOURS = 7
LONGEST = 1024  # frames of a window


def check_options(options: Mapping[str, Any]) -> None:
    """Raises a UserError for options that make no sense."""
    if not -1 <= options["tau"] <= 1 or not 0 <= options["beta"] <= 1 or not 0 <= options["density"] <= 1:
        raise UserError(
            f"holitom: tau={options['tau']} is a cosine, from -1 to 1; beta={options['beta']} and density={options['density']} "
            "are from 0 to 1"
        )


@method(
    summary="of a video, places that do not change merged over time; the others cut by attention",
    paper='Shao et al., "HoliTom", NeurIPS, 2025, arXiv:2505.21334',
    needs=("attention",),
    selects=False,
    adaptive=True,
    check=check_options,
    budget=lambda options: "15%",
    count=floored_share,
    where=lambda depth, decoder: "llm.0" if decoder else "out",
)
@full_precision
def holitom(view: View, keep: int, *, tau: float = 0.8, beta: float = 0.6, density: float = 0.0) -> Reduction:
    attention = attention_by_frame(view, received=True)
    videos, rho = zip(by_frame(view), attention, strict=True), stated_share(view, keep)
    return Reduction.stack([_reduce(x, scores, rho, tau, beta, density) for x, scores in videos])


def _reduce(x: Tensor, attention: Tensor, rho: float, tau: float, beta: float, density: float) -> Reduction:
    """Of one video: x (F, n, D), attention (F, n)."""
    frames, n = attention.shape
    static = F.cosine_similarity(x[1:], x[:-1], dim=-1) > tau  # (F - 1, n)
    windows, gain = find_windows(static)
    share = min(1.0, rho / (1 - gain / (frames * n)))
    groups = torch.full((frames, n), -1, device=x.device)
    shares = torch.zeros((frames, n), device=x.device)
    chosen: list[Tensor] = []  # the token of each output
    made = 0
    for start, stop in windows:
        inside = slice(start, stop)
        still = static[start : stop - 1].all(0) if stop - start > 1 else static[:0].any(0)  # (n,)
        places = still.nonzero()[:, 0]
        if peaks := round(len(places) * share):
            middle = x[inside, places].mean(0)  # (n_s, D)
            centres, labels = (each[0] for each in density_peaks(middle[None], peaks, min(NEIGHBOURS, peaks)))
            groups[inside, places] = made + labels
            shares[inside, places] = _cluster_shares(labels, centres, beta) / (stop - start)
            chosen.append(start * n + places[centres])
            made += peaks
        moving = (~still).nonzero()[:, 0]
        count = math.ceil(len(moving) * share)
        attended = round(count * (1 - density))
        order = attention[inside, moving].argsort(dim=1, descending=True, stable=True)  # (l, n_d)
        first = torch.arange(start, stop, device=x.device)[:, None] * n  # (l, 1)
        at = (first + moving[order[:, :attended]]).flatten()
        groups.view(-1)[at] = torch.arange(made, made + len(at), device=x.device)
        shares.view(-1)[at] = 1.0
        chosen.append(at)
        made += len(at)
        if peaks := count - attended:
            rest = first + moving[order[:, attended:].sort(dim=1).values]  # (l, n_d - attended)
            of_frames = zip(rest, *density_peaks(x.flatten(0, 1)[rest], peaks, min(NEIGHBOURS, peaks)), strict=True)
            for at, centres, labels in of_frames:
                groups.view(-1)[at] = made + labels
                shares.view(-1)[at] = _cluster_shares(labels, centres, beta)
                chosen.append(at[centres])
                made += peaks
    if not made:  # so small a budget that every number was rounded to 0
        chosen, groups = [attention.argmax()[None]], torch.full_like(groups, -1)
        groups.view(-1)[chosen[0]], shares.view(-1)[chosen[0]] = 0, 1.0
    index, assigned = in_order(torch.cat(chosen), groups.flatten())
    return Reduction(index[None], frames * n, assigned=assigned[None], shares=shares.flatten()[None])


def _cluster_shares(labels: Tensor, centres: Tensor, beta: float) -> Tensor:
    """The share of each member in its cluster, (n,): beta for the centre, the rest in equal parts for the others."""
    others = torch.bincount(labels, minlength=len(centres)) - 1  # (K,)
    shares = ((1 - beta) / others.clamp_min(1))[labels]
    return shares.scatter(0, centres, torch.where(others > 0, beta, 1.0))


def find_windows(static: Tensor) -> tuple[list[tuple[int, int]], int]:
    """The windows of frames, [start, stop), with the largest sum of gains, and the sum. static: (F - 1, n)."""
    best, begins = [0], [0]  # of the frames up to each one: the largest sum, and where the last window begins
    run = torch.zeros(static.shape[1], dtype=torch.long, device=static.device)  # for so many frames each place is static
    for end, still in enumerate(static, start=1):
        run = (run + 1) * still
        ending = torch.bincount(run, minlength=end + 1).flip(0).cumsum(0).flip(0).tolist()  # places static for at least so many
        sums = [best[end - 1]]
        for length in range(1, min(end, LONGEST - 1) + 1):
            sums.append((best[end - length - 1] if end > length else 0) + ending[length] * length)
        length = max(range(len(sums)), key=lambda length: (sums[length], -length))
        best.append(sums[length])
        begins.append(end - length)
    windows: list[tuple[int, int]] = []
    end = len(static)
    while end >= 0:
        windows.append((begins[end], end + 1))
        end = begins[end] - 1
    return windows[::-1], best[-1]
