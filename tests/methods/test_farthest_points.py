"""Seeds and groups against a slow double loop in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.cover_reference import slow_farthest_points
from tokensieve.methods import farthest_points as module
from tokensieve.methods.farthest_points import farthest_points


def clustered(n: int, d: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(5, d, generator=generator)
    return centres[torch.randint(5, (n,), generator=generator)] + torch.randn(n, d, generator=generator)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("n", "k"), [(12, 1), (12, 5), (20, 12), (9, 9)])
def test_the_slow_loop(n: int, k: int, seed: int) -> None:
    plain = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    outliers = plain * torch.where(torch.arange(n) % 7 == 3, 9.0, 1.0)[:, None]
    images = torch.stack([plain, clustered(n, 6, seed), outliers, plain + 5.0])
    index, groups = farthest_points(images, k, 2.0)
    decided = 0
    for image, found, joined in zip(images, index.tolist(), groups.tolist(), strict=True):
        seeds, expected, lead = slow_farthest_points(image, k, 2.0)
        if lead > 1e-5:  # else rounding to float32 may decide
            decided += 1
            assert found == seeds
            assert joined == expected
    assert decided >= 2


@pytest.mark.parametrize("limit", [2048, 10])
def test_a_given_first_seed(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAM", limit)
    images = torch.stack([clustered(20, 6, seed) for seed in range(4)])
    first = torch.tensor([3, 0, 19, 7])
    index, groups = farthest_points(images, 6, 2.0, first)
    decided = 0
    for b in range(4):
        seeds, expected, lead = slow_farthest_points(images[b], 6, 2.0, int(first[b]))
        if lead > 1e-5:  # else rounding to float32 may decide
            decided += 1
            assert index[b].tolist() == seeds and int(first[b]) in seeds
            assert groups[b].tolist() == expected
    assert decided >= 2


@pytest.mark.parametrize("seed", range(4))
def test_rounds_find_the_same_seeds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.stack([clustered(150, 8, seed), torch.randn(150, 8, generator=torch.Generator().manual_seed(seed))])
    expected = farthest_points(images, 40, 2.0)
    monkeypatch.setattr(module, "MAX_GRAM", 100)
    monkeypatch.setattr(module, "ROWS", 64)
    for candidates in (3, 16, 400):
        monkeypatch.setattr(module, "CANDIDATES", candidates)
        index, groups = farthest_points(images, 40, 2.0)
        assert torch.equal(index, expected[0])
        assert torch.equal(groups, expected[1])


@pytest.mark.parametrize("limit", [2048, 10])
def test_equal_tokens_go_by_their_place(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAM", limit)
    two = torch.tensor([[4.0, 0.0], [0.0, 3.0]]).repeat(8, 1)[None]  # 16 tokens, two different ones
    index, groups = farthest_points(two, 5, 2.0)
    assert index.tolist() == [[0, 1, 2, 3, 4]]
    assert [groups[0, place].item() for place in range(5)] == [0, 1, 2, 3, 4]
    assert groups[0, 5:].tolist() == [1 if place % 2 else 0 for place in range(5, 16)]
    same = torch.ones(1, 16, 2)
    assert farthest_points(same, 3, 2.0)[0].tolist() == [[0, 1, 2]]
    assert farthest_points(0 * same, 3, 2.0)[0].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("width", [6, 64])
def test_equal_tokens_of_any_width_go_by_their_place_in_rounds(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAM", 10)
    few = torch.randn(4, width, generator=torch.Generator().manual_seed(width))
    index, _ = farthest_points(few.repeat(5, 1)[None], 9, 2.0)  # 20 tokens, four different ones
    assert index.tolist() == [list(range(9))]


def test_more_tokens_than_the_gram_matrix_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    images = clustered(module.MAX_GRAM + 50, 8, 0)[None]
    index, groups = farthest_points(images, 40, 2.0)
    monkeypatch.setattr(module, "MAX_GRAM", 4096)
    same_index, same_groups = farthest_points(images, 40, 2.0)
    assert torch.equal(index, same_index)
    assert (groups == same_groups).float().mean() > 0.999  # near ties between two seeds depend on rounding


def test_the_same_in_any_batch() -> None:
    images = torch.stack([clustered(40, 8, seed) for seed in range(5)])
    index, groups = farthest_points(images, 9, 2.0)
    for number in range(5):
        alone = farthest_points(images[number : number + 1], 9, 2.0)
        assert torch.equal(alone[0][0], index[number])
        assert torch.equal(alone[1][0], groups[number])
