"""DPC-KNN: density peaks are the centres of clusters, and each cluster becomes its mean.

Zeng et al., "Not All Tokens Are Equal: Human-centric Visual Analysis via Token Clustering Transformer", CVPR 2022,
arXiv:2204.08680; as a training-free reduction in Haurum et al., "Which Tokens to Use?", ICCV workshops 2023, arXiv:2308.04657.
Written from the formulas; the released code of both is Apache-2.0 and MIT.

    centres and clusters as in `density_peaks`, of the tokens that enter a block; k nearest neighbours, itself included
    output = mean of the cluster (the released code adds 1e-6 to the denominator)

Place and budget there: before blocks 4, 7 and 10 of 12 (@3,6,9), int(196 * rate^i) clusters without CLS, k = 5. The output has
the order of the centres' scores. TCFormer weights the mean by exp of a learned score; without one the mean is plain.

Where we differ: ties by position instead of noise, and the mean is exact. The authors pass no sizes on, and a token counts
once, whatever was merged into it before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.density_peaks import density_peaks
from tokensieve.methods.places import after_quarters, powers_of_share
from tokensieve.methods.registry import method


def check_options(options: Mapping[str, Any]) -> None:
    """Raises a UserError for options that make no sense."""
    if options["k"] < 2:
        raise UserError(f"dpcknn: k={options['k']} counts the token itself, so it is at least 2; 5 is the default")


@method(
    summary="clusters around density peaks, each merged into its mean",
    paper='Zeng et al., "Not All Tokens Are Equal" (TCFormer), CVPR, 2022, arXiv:2204.08680',
    selects=False,
    check=check_options,
    budget=lambda options: "70%",
    where=after_quarters,
    count=powers_of_share,
)
def dpcknn(view: View, keep: int, *, k: int = 5) -> Reduction:
    centres, labels = density_peaks(view.tokens, keep, k)  # (B, K), (B, N)
    merged = Reduction.merge(labels, centres, torch.ones_like(labels, dtype=torch.float32))
    return replace(merged, sizes=None)
