"""Losses of re-identification: cross-entropy of the identity, triplets with the hardest positive and negative, and
the features of a teacher."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_SQUARED = 1e-12  # lower bound of squared distances: the gradient of a root is infinite at 0


def distances(features: Tensor) -> Tensor:
    """Euclidean distances between all features of a batch: (B, F) -> (B, B)."""
    features = features.float()
    norms = features.square().sum(1)  # (B,)
    squared = norms[:, None] + norms[None] - 2 * features @ features.T
    return squared.clamp_min(MIN_SQUARED).sqrt()


def hard_triplet(features: Tensor, labels: Tensor) -> Tensor:
    """The mean over the batch of softplus(farthest of the same identity - nearest of another one): (B, F), (B,) -> ().

    An anchor is its own positive where it has no other, at distance 0; one without any other identity in the batch is left out.
    """
    with torch.autocast(features.device.type, enabled=False):
        pairwise = distances(features)
        same = labels[:, None] == labels[None]  # (B, B)
        farthest = pairwise.masked_fill(~same, 0.0).amax(1)
        nearest = pairwise.masked_fill(same, torch.inf).amin(1)
        valid = ~same.all(1)
        return F.softplus(farthest[valid] - nearest[valid]).sum() / max(1, int(valid.sum()))


def imitation(features: Tensor, wanted: Tensor) -> Tensor:
    """How far features are from a teacher's, as a share of how far the teacher's are from their mean: (B, F), (B, F) -> ().

    Of unit length, as they are compared. Features of a batch are nearly parallel, so that a cosine with the teacher's would
    hardly depend on what distinguishes them.
    """
    found, wanted = F.normalize(features.float(), dim=-1), F.normalize(wanted.float(), dim=-1)
    spread = (wanted - wanted.mean(0)).square().sum()
    return (found - wanted).square().sum() / spread.clamp_min(MIN_SQUARED)


def identity(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy with the target 1 - smoothing, the rest spread over all classes: (B, C), (B,) -> ()."""
    return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
