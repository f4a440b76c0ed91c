"""How near a reduced model is to the full one, image by image. No labels: the outputs of the full model are the reference.

Everything is computed in float64, since a good plan differs from the full model in the fourth digit.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64  # distributions that are compared at a time


def cosine_distance(full: Tensor, reduced: Tensor) -> Tensor:
    """1 - cosine of each row, (N, F), (N, F) -> (N,)."""
    return 1 - F.cosine_similarity(full.double(), reduced.double(), dim=-1)


def kl_divergence(full: Tensor, reduced: Tensor) -> Tensor:
    """KL(full || reduced) of each row in nats, of logits (N, V), (N, V) -> (N,)."""
    parts = []
    for p, q in zip(full.split(ROWS), reduced.split(ROWS), strict=True):
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        terms = torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q))  # 0 log 0 = 0
        parts.append(terms.sum(-1).clamp_min(0))
    return torch.cat(parts)


def same_choice(full: Tensor, reduced: Tensor) -> Tensor:
    """1 where the largest entry of a row is the same, else 0, (N, V), (N, V) -> (N,)."""
    return (full.argmax(-1) == reduced.argmax(-1)).double()


def same_nearest(full: Tensor, reduced: Tensor) -> Tensor:
    """1 where the most similar other row is the same, else 0, (N, F), (N, F) -> (N,)."""
    return (_similarities(full, -torch.inf).argmax(-1) == _similarities(reduced, -torch.inf).argmax(-1)).double()


def rank_correlation(full: Tensor, reduced: Tensor) -> Tensor:
    """Spearman's correlation of each row's similarities to all others, (N, F), (N, F) -> (N,)."""
    n = len(full)
    others = ~torch.eye(n, dtype=torch.bool)
    ranks = [_similarities(x, 0.0)[others].view(n, n - 1).argsort(-1).argsort(-1).double() for x in (full, reduced)]
    a, b = (rank - rank.mean(-1, keepdim=True) for rank in ranks)
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt().clamp_min(1e-12)


def _similarities(features: Tensor, own: float) -> Tensor:
    """Cosines of all pairs of rows, (N, F) -> (N, N); own: what stands on the diagonal."""
    unit = F.normalize(features.double(), dim=-1)
    return (unit @ unit.T).fill_diagonal_(own)


def mean_and_stderr(values: Tensor) -> tuple[float, float]:
    """The mean of (N,) values and its standard error; NaN for the error of a single one."""
    values = values.double()
    return values.mean().item(), values.std().item() / math.sqrt(len(values))


def paired_difference(values: Tensor, reference: Tensor) -> tuple[float, float]:
    """The mean of values - reference over the same images, (N,), (N,), and its standard error."""
    return mean_and_stderr(values.double() - reference.double())
