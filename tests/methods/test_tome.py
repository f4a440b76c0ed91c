"""tome against a slow matching in float64; its default position and budget; the limit of half of the tokens."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from torch import Tensor

import tokensieve
from tests.support.rounding import assert_near
from tokensieve import Plan, Reduction, View
from tokensieve.cutting.passes import Row
from tokensieve.errors import PlanWarning
from tokensieve.methods.registry import REGISTRY, method
from tokensieve.methods.tome import tome
from tokensieve.scoring import Attention
from tokensieve.testing.tiny_vlms import llava, prompts


def slow(keys: Tensor, tokens: Tensor, sizes: Tensor, prefix: int, r: int) -> tuple[list[list[int]], list[list[float]]]:
    """The groups of patches and their means for one image, by loops in float64. keys: (H, P+N, d), tokens: (N, D)."""
    metric = keys.double().mean(0).tolist()
    total = len(metric)

    def cosine(i: int, j: int) -> float:
        product = sum(x * y for x, y in zip(metric[i], metric[j], strict=True))
        return product / math.sqrt(sum(x * x for x in metric[i])) / math.sqrt(sum(y * y for y in metric[j]))

    edges = []
    for i in range(0, total, 2):
        for_i = [(cosine(i, j), j) for j in range(1, total, 2) if j >= prefix]
        if i >= prefix and for_i:
            edges.append((*max(for_i), i))
    edges.sort(reverse=True)
    groups = {i: [i] for i in range(prefix, total)}
    for _, j, i in edges[: min(r, (total - prefix) // 2)]:
        groups[j] += groups.pop(i)
    members = [sorted(i - prefix for i in group) for group in groups.values()]
    x, s = tokens.double().tolist(), sizes.double().tolist()
    means = [
        [sum(s[i] * x[i][d] for i in group) / sum(s[i] for i in group) for d in range(tokens.shape[1])] for group in members
    ]
    return members, means


def draw_view(seed: int, n: int, prefix: int, has_sizes: bool) -> View:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, prefix + n, 6, generator=generator)
    q, k = torch.randn(2, 2, 3, prefix + n, 4, generator=generator)
    sizes = torch.randint(1, 6, (2, n), generator=generator).float() if has_sizes else None
    return View(x[:, prefix:], x[:, :prefix], None, Attention(q, k, prefix, 0.5), sizes=sizes, has_cls=prefix > 0)


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("n", [2, 3, 7, 24])
def test_the_matching(n: int, prefix: int) -> None:
    for seed in range(12):
        view = draw_view(100 * n + 10 * prefix + seed, n, prefix, has_sizes=seed % 2 == 1)
        r = (seed * n) // 16  # from nothing to more than half
        reduction = tome(view, n - r)
        assert reduction.k == n - min(r, n // 2)
        means = reduction.apply(view.tokens)
        for image in range(2):
            sizes = view.sizes_or_ones()[image]
            expected, values = slow(view.attention.k[image], view.tokens[image], sizes, prefix, r)
            groups, representatives = reduction.groups[image].tolist(), reduction.index[image].tolist()
            found = [[i for i, group in enumerate(groups) if group == number] for number in range(reduction.k)]
            assert sorted(found) == sorted(expected)
            assert all(token in group for token, group in zip(representatives, found, strict=True))
            order = [expected.index(group) for group in found]
            assert_near(means[image], torch.tensor(values, dtype=torch.float64)[order])
            assert reduction.sizes[image].tolist() == [float(sizes[group].sum()) for group in found]


def test_of_equal_keys_the_first_wins() -> None:
    view = draw_view(0, 8, 1, has_sizes=False)
    view.attention.k[:] = 1.0  # patches 1, 3, 5, 7 are in A and join patch 0
    reduction = tome(view, 6)
    assert reduction.groups.tolist() == [[2, 2, 3, 2, 4, 0, 5, 1]] * 2
    assert reduction.index.tolist() == [[5, 7, 0, 2, 4, 6]] * 2


def test_keys_of_length_zero_are_similar_to_nothing() -> None:
    view = draw_view(0, 8, 1, has_sizes=False)
    view.attention.k[:, :, 2] = 0.0
    assert tome(view, 5).apply(view.tokens).isfinite().all()


def test_the_plan_of_the_paper(tiny_clip: object) -> None:
    model, _, _ = tiny_clip.make()  # type: ignore[attr-defined]
    images = torch.randn(2, 3, 48, 32, generator=torch.Generator().manual_seed(0))
    assert str(Plan.parse("tome")) == "tome" and str(Plan.parse("tome:-3")) == "tome:-3"
    outputs, ledgers = [], []
    with torch.no_grad():
        for plan in ("tome:-3", "tome@*.attn:-3"):
            with tokensieve.apply(model, plan) as handle:
                outputs.append(model.encode_image(images))
                ledgers.append(handle.ledger)
    assert torch.equal(*outputs) and ledgers[0] == ledgers[1]
    n = handle.grid[0] * handle.grid[1]
    assert ledgers[0] == [Row(f"{i + 1}.attn", n - 3 * i, n - 3 * i - 3) for i in range(len(ledgers[0]))]
    with pytest.warns(PlanWarning), tokensieve.apply(model, "tome") as handle:
        model.encode_image(images)
    assert handle.ledger[0] == Row("1.attn", n, n - 8)


@pytest.mark.parametrize("schedule", ["4/2", "4/2/0/0"])
@pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")  # where nothing is merged
def test_behind_the_end_of_a_schedule_nothing_is_merged(schedule: str) -> None:
    model = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=4, embed_dim=32, num_heads=2).eval()
    with torch.no_grad(), tokensieve.apply(model, f"tome(schedule={schedule})") as handle:
        model(torch.randn(1, 3, 64, 64))
    assert [row.tokens_out for row in handle.ledger] == [12, 10, 10, 10]


def test_at_most_half_is_merged_and_a_note_says_so(tiny_clip: object) -> None:
    model, _, _ = tiny_clip.make()  # type: ignore[attr-defined]
    images = torch.randn(2, 3, 48, 32, generator=torch.Generator().manual_seed(0))
    with pytest.warns(PlanWarning, match=r"at layer 2.attn .* the budget is :-500, but tome cannot keep fewer than"):
        handle = tokensieve.apply(model, "tome@2.attn:-500")
    with torch.no_grad(), handle:
        model.encode_image(images)
    (row,) = handle.ledger
    assert row.tokens_out == row.tokens_in - row.tokens_in // 2


@pytest.mark.parametrize("plan", ["tome@1.attn:-5 + tome@2.attn:-3", "tome@2:-5", "tome@out:-5", "tome:-2(sizes=no)"])
def test_positions(tiny_clip: object, plan: str) -> None:
    model, _, _ = tiny_clip.make()  # type: ignore[attr-defined]
    images = torch.randn(3, 3, 48, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        together, groups = model.encode_image(images), handle.groups
        assert together.isfinite().all()
        for number in range(3):
            assert_near(model.encode_image(images[number : number + 1])[0], together[number], steps=2000)
            assert torch.equal(handle.groups[0], groups[number])


def test_prefix_tokens_are_counted_and_never_merged() -> None:
    model = timm.create_model("deit_tiny_distilled_patch16_224", img_size=64, depth=2, embed_dim=32, num_heads=2).eval()
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), tokensieve.apply(model, "tome:-5") as handle:
        tokens = model.forward_features(images)
    stages: list[tuple[str, Reduction]] = handle.stages
    assert tokens.shape[1] == 2 + 16 - 10
    assert set(range(1, 16, 2)) <= set(stages[0][1].index[0].tolist())  # CLS and patches 0, 2, ... are in A


def test_a_decoder_sees_the_tokens_in_the_order_of_the_tower() -> None:
    views: list[View] = []
    try:

        @method(summary="the first tokens")
        def first_tokens(view: View, keep: int) -> Reduction:
            views.append(view)
            return Reduction.keep(torch.arange(keep).expand(len(view.tokens), -1), view.n)

        model = llava()
        with torch.no_grad(), tokensieve.apply(model, "tome:-4 + first_tokens@llm.0:6") as handle:
            model(**prompts())
    finally:
        REGISTRY.remove("first_tokens")
    in_tower = handle.stages[-2][1]
    assert len(set(in_tower.sizes[0].tolist())) > 1 and (in_tower.index.diff(dim=1) < 0).any()
    assert torch.equal(views[0].sizes, in_tower.sizes)  # so that handle.kept and handle.groups are those of the decoder
