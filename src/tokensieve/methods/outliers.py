"""Outliers of a distribution by its quartiles: the values above Q3 + 1.5 (Q3 - Q1), of each image by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.scoring import full_precision


@full_precision
def above_quartiles(values: Tensor) -> Tensor:
    """Which values (B, N) are above Q3 + 1.5 (Q3 - Q1); quartiles are interpolated linearly."""
    values = values.float()
    low, high = torch.quantile(values, torch.tensor([0.25, 0.75], device=values.device), dim=-1, keepdim=True)
    above: Tensor = values > high + 1.5 * (high - low)
    return above
