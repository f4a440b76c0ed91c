"""Accuracies, average precision and their standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def accuracies(best: Tensor, hits: Tensor, targets: Tensor, five: bool) -> dict[str, float]:
    """acc1, acc5 (NaN unless `five`: with few classes it means nothing), mean_per_class_recall and their standard errors.

    best (N,): the nearest class; hits (N,k): is the j-th nearest the right one; targets (N,).
    """
    acc1 = hits[:, :1].sum().item() / len(targets)
    acc5 = hits[:, :5].sum().item() / len(targets) if five else math.nan
    recall, recall_stderr = mean_per_class_recall(best, targets)
    return {
        "acc1": acc1,
        "acc5": acc5,
        "mean_per_class_recall": recall,
        "acc1_stderr": share_stderr(acc1, len(targets)),
        "acc5_stderr": share_stderr(acc5, len(targets)),
        "mean_per_class_recall_stderr": recall_stderr,
    }


def share_stderr(share: float, n: int) -> float:
    """Standard error of a share of n independent samples: sqrt(p (1-p) / n)."""
    return math.sqrt(share * (1 - share) / n)


def mean_per_class_recall(best: Tensor, targets: Tensor) -> tuple[float, float]:
    """Mean of the recall over the classes that occur, and its standard error (classes independent, binomial in each)."""
    size = max(int(best.max()), int(targets.max())) + 1
    total = torch.bincount(targets, minlength=size).double()  # (C,)
    right = torch.bincount(targets[best == targets], minlength=size).double()  # (C,)
    occurs = total > 0
    recall = right[occurs] / total[occurs]
    variance = recall * (1 - recall) / total[occurs]
    return recall.mean().item(), (variance.sum().sqrt() / occurs.sum()).item()


def mean_average_precision(logits: Tensor, targets: Tensor) -> float:
    """Mean over the classes of the average precision (a class without a positive counts as 0, as in clip_benchmark)."""
    order = logits.argsort(dim=0, descending=True)  # (N,C)
    truth = targets.gather(0, order).float()
    rank = torch.arange(1, len(logits) + 1, dtype=torch.float32)[:, None]
    precision = truth.cumsum(dim=0) / rank
    positives = truth.bool()
    summed = torch.where(positives, precision, 0.0).sum(dim=0)  # (C,)
    return (summed / truth.sum(dim=0).clamp(min=1)).mean().item()


def bootstrap_stderr(metric: Callable[[Tensor, Tensor], float], logits: Tensor, targets: Tensor, draws: int = 100) -> float:
    """Standard deviation of the metric over sets of images drawn with replacement (fixed seed, 100 draws)."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(draws):
        sample = torch.randint(len(logits), (len(logits),), generator=generator)
        values.append(metric(logits[sample], targets[sample]))
    return float(torch.tensor(values, dtype=torch.float64).std())


def grouped_stderr(hits: Tensor, group: Tensor) -> float:
    """Standard error of the mean of hits (T,), of which those of one group (T,) may depend on each other.

    With one hit a group it is sqrt(p (1-p) / n).
    """
    away = torch.zeros(int(group.max()) + 1, dtype=torch.float64)
    away.index_add_(0, group, hits.double() - hits.double().mean())
    return math.sqrt(float(away.square().sum())) / len(hits)
