"""The greedy cover with bounds chooses what the full search does, and ends with any numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokensieve.methods.greedy_cover import greedy_cover

N, K = 90, 40


def benefits(seed: int) -> Tensor:
    return torch.rand(3, N, N, generator=torch.Generator().manual_seed(seed)) ** 4


def choose(table: Tensor) -> Tensor:
    """Of benefits (B, rows, N)."""
    return greedy_cover(lambda some: table.gather(2, some[:, None].expand(-1, N, -1)), torch.ones(len(table), N), K)[0]


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_full_search(seed: int) -> None:
    table = benefits(seed)
    index = choose(table)
    for image, chosen in zip(table, index.tolist(), strict=True):
        best = torch.zeros(N, 1)
        for number, token in enumerate(chosen):
            gains = (image - best).clamp_min(0).sum(0)
            gains[chosen[:number]] = -torch.inf
            assert gains[token] >= gains.max() * (1 - 1e-5)
            best = torch.maximum(best, image[:, token : token + 1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_it_ends_with_numbers_that_are_not_finite(value: float) -> None:
    table = benefits(0)
    table[0, :, 5] = value
    table[1] = value
    index = choose(table)
    assert index.shape == (3, K) and torch.equal(index[2], choose(benefits(0))[2])
