"""Ranking for re-identification against loops that walk one query's list at a time."""

from __future__ import annotations

import math
import resource
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.ranking_reference import slow_ranking
from tokensieve.errors import UserError
from tokensieve.reid import ranking
from tokensieve.reid.ranking import block_size, order, rank


def draw(seed: int, n: int = 25, m: int = 60, width: int = 5, ties: bool = True) -> dict[str, Any]:
    """Random features and ids; with ties on a coarse grid, so that many gallery features are the same."""
    random = np.random.default_rng(seed)
    kind = (lambda size: random.integers(-1, 2, size) + 0.0) if ties else (lambda size: random.normal(size=size))
    queries, gallery = kind((n, width)), kind((m, width))
    queries[~queries.any(1)] = gallery[~gallery.any(1)] = 1.0
    return {
        "queries": torch.tensor(queries, dtype=torch.float32),
        "gallery": torch.tensor(gallery, dtype=torch.float32),
        "query_ids": torch.tensor(random.integers(0, 12, n)),
        "gallery_ids": torch.tensor(random.integers(2, 10, m)),  # 0, 1, 10 and 11 are not in the gallery
        "query_groups": torch.tensor(random.integers(0, 3, n)),
        "gallery_groups": torch.tensor(random.integers(0, 3, m)),
    }


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_numbers_are_those_of_the_definitions(seed: int, ties: bool) -> None:
    data = draw(seed, ties=ties)
    made, expected = rank(**data), slow_ranking(*(value.tolist() for value in data.values()))
    assert any(one is None for one in expected) and made.left_out == sum(one is None for one in expected)
    for ap, first, one in zip(made.ap.tolist(), made.first.tolist(), expected, strict=True):
        assert (math.isnan(ap) and first == 0) if one is None else (ap == pytest.approx(one[0], abs=1e-12) and first == one[1])
    told, counted = made.metrics(), [one for one in expected if one]
    aps = np.array([ap for ap, _ in counted])
    assert told["mAP"] == pytest.approx(aps.mean()) and told["mAP_stderr"] == pytest.approx(aps.std() / math.sqrt(len(aps)))
    curve = [sum(first <= k for _, first in counted) / len(counted) for k in range(1, 51)]
    assert told["cmc"] == pytest.approx(curve)
    assert [told[f"rank_{k}"] for k in (1, 5, 10)] == [told["cmc"][k - 1] for k in (1, 5, 10)]


@pytest.mark.slow
def test_without_ties_it_is_the_average_precision_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    data = draw(9, ties=False)
    made = rank(**data)
    scores = torch.nn.functional.normalize(data["queries"]) @ torch.nn.functional.normalize(data["gallery"]).T
    for row in made.counted.nonzero().flatten().tolist():
        right = data["gallery_ids"] == data["query_ids"][row]
        stays = ~(right & (data["gallery_groups"] == data["query_groups"][row]))
        expected = metrics.average_precision_score(right[stays].numpy(), scores[row][stays].numpy())
        assert float(made.ap[row]) == pytest.approx(expected)


@pytest.mark.parametrize("block", [1, 2, 7, 1000])
def test_the_block_changes_nothing(block: int) -> None:
    data = draw(3)
    whole, parts = rank(**data), rank(**data, block=block)
    assert torch.equal(whole.first, parts.first) and torch.equal(whole.ap.nan_to_num(-1), parts.ap.nan_to_num(-1))


def test_the_curve_of_a_short_gallery_goes_on_with_its_last_value() -> None:
    made = rank(
        torch.eye(2),
        torch.tensor([[1.0, 0.1], [0.1, 1.0]]),
        query_ids=[7, 7],
        gallery_ids=[7, 8],
        query_groups=[0, 0],
        gallery_groups=[1, 1],
    )
    assert made.first.tolist() == [1, 2] and made.metrics()["cmc"] == pytest.approx([0.5] + [1.0] * 49)


def test_a_set_ranked_against_itself_does_not_find_the_query() -> None:
    features = torch.eye(3)
    ids, cameras = [6, 5, 5], [0, 0, 1]
    made = rank(features, features, query_ids=ids, gallery_ids=ids, query_groups=cameras, gallery_groups=cameras)
    assert made.left_out == 1 and made.first.tolist() == [0, 2, 2]  # all distances but that to itself are equal
    assert made.ap.tolist()[1:] == pytest.approx([0.5, 0.5]) and made.mean_ap == pytest.approx(0.5)


def test_equal_features_stand_in_the_order_of_the_gallery_however_many_are_ranked() -> None:
    features = torch.randn(1, 333, generator=torch.Generator().manual_seed(0))
    gallery = features.repeat(9999, 1)
    done = order(features[0], gallery, query_id=0, gallery_ids=[1] * 9999, query_group=0, gallery_groups=[0] * 9999)
    assert torch.equal(done.indices, torch.arange(9999)) and not done.right.any()


def test_the_order_of_one_query_is_what_it_was_ranked_by() -> None:
    data = draw(5)
    made = rank(**data)
    for row in made.counted.nonzero().flatten().tolist():
        done = order(
            data["queries"][row],
            data["gallery"],
            query_id=int(data["query_ids"][row]),
            gallery_ids=data["gallery_ids"],
            query_group=int(data["query_groups"][row]),
            gallery_groups=data["gallery_groups"],
        )
        assert bool((done.distances.diff() >= -1e-7).all())
        assert torch.equal(done.right, data["gallery_ids"][done.indices] == data["query_ids"][row])
        assert 1 + int(done.right.nonzero()[0]) == int(made.first[row])
        mine = data["gallery_ids"] == data["query_ids"][row]
        taken_out = mine & (data["gallery_groups"] == data["query_groups"][row])
        assert sorted(done.indices.tolist()) == (~taken_out).nonzero().flatten().tolist()


def test_what_cannot_be_ranked_is_told() -> None:
    data = draw(0)
    with pytest.raises(UserError, match="none of the 25 queries has a right answer"):
        rank(**{**data, "gallery_ids": torch.full((60,), 99)})
    with pytest.raises(UserError, match="NaN"):
        rank(**{**data, "queries": data["queries"] * math.nan})
    with pytest.raises(UserError, match="empty"):
        rank(**{name: value[:0] if "gallery" in name else value for name, value in data.items()})


@pytest.mark.parametrize("gallery", [0, 1, 1000, 100_000, 10**9])
def test_a_block_takes_no_more_memory_than_allowed(gallery: int) -> None:
    block = block_size(gallery)
    assert block >= 1 and (block == 1 or block * gallery * ranking.EACH <= ranking.MEMORY)
    assert block_size(gallery, ranking.MEMORY // 4) <= block


@pytest.mark.slow
def test_a_hundred_thousand_of_a_gallery_fit_in_memory() -> None:
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(500, 64, generator=random)

    def some(n: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(500, (n,), generator=random)
        return centres[ids] + 2.5 * torch.randn(n, 64, generator=random), ids

    (queries, query_ids), (gallery, gallery_ids) = some(2_000), some(100_000)
    groups: dict[str, Any] = {"query_groups": torch.zeros(2_000).long(), "gallery_groups": torch.arange(100_000) % 4}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = rank(queries, gallery, query_ids=query_ids, gallery_ids=gallery_ids, **groups)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 2 * ranking.MEMORY + gallery.nbytes  # all distances at once would take 8 GB
    few = slice(0, 3)
    groups["query_groups"] = groups["query_groups"][few]
    alone = rank(queries[few], gallery, query_ids=query_ids[few], gallery_ids=gallery_ids, **groups)
    assert torch.equal(alone.ap, made.ap[few]) and made.left_out == 0 and 0.01 < made.mean_ap < 0.9
