"""Fidelity against slow formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tokensieve.tasks.fidelity.measures import (
    cosine_distance,
    kl_divergence,
    mean_and_stderr,
    paired_difference,
    rank_correlation,
    same_choice,
    same_nearest,
)

N, F = 130, 7


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    full = torch.randn(N, F)
    return full, full + 0.4 * torch.randn(N, F)


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def test_cosine_distance(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    expected = [1 - cosine(a, b) for a, b in zip(*(x.double().tolist() for x in pair), strict=True)]
    assert cosine_distance(*pair).tolist() == pytest.approx(expected, abs=1e-12)
    near = pair[0] * (1 + 1e-7)
    assert cosine_distance(pair[0], near).abs().max() < 1e-12  # float32 would give 1e-7


def test_kl_divergence(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    expected = []
    for a, b in zip(*(x.double().tolist() for x in pair), strict=True):
        p, q = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in (a, b))
        expected.append(sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)))
    assert kl_divergence(*pair).tolist() == pytest.approx(expected, rel=1e-9)
    assert kl_divergence(pair[0], pair[0]).tolist() == [0.0] * N


def test_kl_divergence_of_excluded_tokens_is_finite() -> None:
    full = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert kl_divergence(full, torch.tensor([[0.0, 1.0, -torch.inf]])).item() == 0


def test_agreements(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows = [x.double().tolist() for x in pair]
    choices = [[max(range(F), key=row.__getitem__) for row in x] for x in rows]
    assert same_choice(*pair).tolist() == [float(a == b) for a, b in zip(*choices, strict=True)]
    nearest = [[max((j for j in range(N) if j != i), key=lambda j: cosine(x[i], x[j])) for i in range(N)] for x in rows]
    assert same_nearest(*pair).tolist() == [float(a == b) for a, b in zip(*nearest, strict=True)]


def test_rank_correlation(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    full, reduced = (x[:20].double().tolist() for x in pair)
    expected = []
    for i in range(20):
        others = [j for j in range(20) if j != i]
        ranks = []
        for x in (full, reduced):
            order = sorted(others, key=lambda j: cosine(x[i], x[j]))
            ranks.append([order.index(j) for j in others])
        n = len(others)
        expected.append(1 - 6 * sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)) / (n * (n * n - 1)))
    assert rank_correlation(pair[0][:20], pair[1][:20]).tolist() == pytest.approx(expected, abs=1e-12)


def test_a_paired_error_is_smaller_than_an_unpaired_one() -> None:
    values = torch.tensor([0.1, 0.5, 0.9, 0.3])
    mean, stderr = mean_and_stderr(values)
    spread = sum((x - 0.45) ** 2 for x in (0.1, 0.5, 0.9, 0.3)) / 3
    assert (mean, stderr) == pytest.approx((0.45, math.sqrt(spread / 4)))
    assert paired_difference(values + 0.02, values) == pytest.approx((0.02, 0.0), abs=1e-8)
