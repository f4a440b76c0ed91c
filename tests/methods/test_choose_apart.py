"""The greedy choice against a slow loop, in numpy (small batches) and in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokensieve.methods import choose_apart as module
from tokensieve.methods.choose_apart import choose_apart


def slow(values: Tensor, first: int, k: int) -> list[int]:
    order = [first]
    while len(order) < k:
        least = [min(float(values[s, j]) for s in order) for j in range(len(values))]
        order.append(max(range(len(values)), key=lambda j: (least[j], -j)))
    return order


@pytest.mark.parametrize("small", [0, 8])
@pytest.mark.parametrize("levels", [3, 1000], ids=["ties", "no ties"])
def test_both_ways_are_the_slow_loop(monkeypatch: pytest.MonkeyPatch, small: int, levels: int) -> None:
    monkeypatch.setattr(module, "SMALL_BATCH", small)
    generator = torch.Generator().manual_seed(levels)
    values = torch.randint(levels, (3, 17, 17), generator=generator).float()
    values.diagonal(dim1=1, dim2=2).fill_(-1.0)
    first = torch.tensor([0, 5, 16])
    for k in (1, 2, 9, 17):
        found = choose_apart(values, first, k)
        assert found.tolist() == [slow(image, int(one), k) for image, one in zip(values, first, strict=True)]
        assert all(len(set(row)) == k for row in found.tolist())
