"""PixelPrune: patches whose pixels can be predicted from a neighbour are dropped before the tower runs.

"PixelPrune", 2026, arXiv:2604.00886. Written from its rule; the released code is Apache-2.0.

    a patch is compared with a neighbour: A on its left, B above it, C above A
    predicted by A in the first row, by B in the first column; else by B if C is like A and unlike B, and by A otherwise
    kept if it is unlike its prediction; the first patch is always kept
    alike: the largest difference of two pixel values is at most tau (metric=max; or their mean, or root mean square)

With tau = 0, alike means equal to the bit, which documents and screens have and photos do not. With tau > 0 and `anchored`,
neighbours are what the reader of the kept patches would see: a dropped patch counts as its prediction. So no patch differs
from what stands for it by more than tau.

Place: before the first block (@0). The number of tokens is the image's own. A budget is the most that are kept: the patches
that differ most from their predictions. The released code compares whole groups of patches that Qwen-VL's merger joins; here
the unit is a patch. Pixel values are differences in [0, 1], of images that were normalised with the deviation `std` (0.5 in
Qwen-VL).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.registry import method

Metric = Literal["max", "mae", "rmse"]


def check_options(options: Mapping[str, Any]) -> None:
    if not 0 <= options["tau"] <= 1:
        raise UserError(f"pixelprune: tau={options['tau']} is not from 0 to 1, the range of pixel values")
    if not 0 < options["std"] <= 1:
        raise UserError(f"pixelprune: std={options['std']} is not a deviation of pixel values, above 0 and at most 1")


@method(
    summary="patches that a neighbouring patch predicts are dropped, by their pixels, before the tower",
    paper='"PixelPrune", 2026, arXiv:2604.00886',
    needs=("pixels",),
    adaptive=True,
    budget=lambda options: "100%",
    where="0",
    check=check_options,
)
def pixelprune(
    view: View, keep: int, *, tau: float = 0.0, metric: Metric = "max", anchored: bool = True, std: float = 0.5
) -> Reduction:
    """The patches that are unlike their predictions, at most `keep`."""
    assert view.pixels is not None
    w = view.n if view.grid is None else view.grid[-1]
    h = view.n // w  # frames of a video are one below the other
    patches = view.pixels.float().flatten(2) * std  # (B, N, F)
    distance = _anchored(patches, h, w, tau, metric) if anchored and tau > 0 else _plain(patches, h, w, tau, metric)
    distance[:, 0] = torch.inf
    rank = distance.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return Reduction.keep_some((distance > tau) & (rank < keep), view.sizes, distance.nan_to_num(posinf=1.0))


def _differ(x: Tensor, y: Tensor, metric: Metric) -> Tensor:
    difference = (x - y).abs()
    if metric == "max":
        return difference.amax(-1)
    return difference.mean(-1) if metric == "mae" else difference.square().mean(-1).sqrt()


def _plain(patches: Tensor, h: int, w: int, tau: float, metric: Metric) -> Tensor:
    """How much each patch differs from its prediction by true neighbours: (B, N, F) -> (B, N)."""
    x = patches.unflatten(1, (h, w))  # (B, h, w, F)
    a, b = x.roll(1, dims=2), x.roll(1, dims=1)  # left, above
    c = b.roll(1, dims=2)
    by_above = (_differ(c, a, metric) <= tau) & (_differ(c, b, metric) > tau)  # (B, h, w)
    by_above[:, 0], by_above[:, 1:, 0] = False, True
    return torch.where(by_above, _differ(x, b, metric), _differ(x, a, metric)).flatten(1)


def _anchored(patches: Tensor, h: int, w: int, tau: float, metric: Metric) -> Tensor:
    """The same with neighbours as they are reconstructed, patch by patch."""
    seen = patches.clone()  # (B, N, F), dropped patches as their predictions
    distance = torch.zeros_like(patches[..., 0])
    for at in range(1, h * w):
        row, column = divmod(at, w)
        left, above = seen[:, at - 1], seen[:, at - w] if row else seen[:, at - 1]
        predicted = above if column == 0 else left
        if row and column:
            corner = seen[:, at - w - 1]
            by_above = (_differ(corner, left, metric) <= tau) & (_differ(corner, above, metric) > tau)
            predicted = torch.where(by_above[:, None], above, left)
        distance[:, at] = _differ(patches[:, at], predicted, metric)
        seen[:, at] = torch.where((distance[:, at] > tau)[:, None], patches[:, at], predicted)
    return distance
