"""SDTPS: its formulas against slow ones, its traps, its shapes, and its place among the methods."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

import tokensieve
from tests.support.reference import assert_clear, in_float64
from tests.support.rounding import assert_near
from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.farthest_points import farthest_points
from tokensieve.methods.registry import get_method
from tokensieve.methods.sdtps import CLIP, EPSILON, Sdtps, sdtps
from tokensieve.methods.sdtps_modules import TokenAggregation, TokenSparse
from tokensieve.reid.build import build
from tokensieve.reid.model import Settings
from tokensieve.testing import check_method, make_view, one_image

MODALITIES = ("RGB", "NI", "TI")


def view_of(tokens: Tensor, own: Tensor, part: Sdtps, **context: object) -> View:
    return View(tokens, own[:, None], grid=None, part=part, context=context)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scaled(cosines: list[float]) -> list[float]:
    low, high = min(cosines), max(cosines)
    return [(c - low) / (high - low) for c in cosines]


def slow_scores(sparse: TokenSparse, tokens: Tensor, own: Tensor, others: list[Tensor]) -> list[float]:
    """s of one image, patch by patch, as the formulas are written, in float64: two other modalities."""
    sparse, tokens, own = in_float64(sparse), tokens.double(), own.double()
    others = [other.double() for other in others]

    def cos(a: Tensor, b: Tensor) -> float:
        return float((a @ b) / (a.norm() * b.norm()))

    s_im = scaled([cos(v, own) for v in tokens])
    s_m2, s_m3 = ([*scaled([cos(v, other) for v in tokens])] for other in others)
    s_p = [1 / (1 + math.exp(-float(sparse.score_predictor(v)))) for v in tokens]
    beta = sparse.beta
    return [(1 - 2 * beta) * p + beta * (m2 + m3 + 2 * im) for p, m2, m3, im in zip(s_p, s_m2, s_m3, s_im, strict=True)]


@torch.no_grad()
def test_scores_selection_and_extra_token_are_the_formulas() -> None:
    sparse = TokenSparse(dim=16, beta=0.2).eval()
    tokens, own, others = drawn(2, 10, 16), drawn(2, 16, seed=1), drawn(2, 2, 16, seed=2)
    made = sparse(tokens, own, others)
    for b in range(2):
        scores = slow_scores(sparse, tokens[b], own[b], list(others[b]))
        assert_near(made.scores[b], torch.tensor(scores, dtype=torch.float64))
        best = sorted(sorted(range(10), key=lambda i: -scores[i])[:5])
        assert_clear(scores, best)
        assert made.index[b].tolist() == best
        left = [i for i in range(10) if i not in best]
        total = sum(math.exp(scores[i]) for i in left)
        extra = sum(math.exp(scores[i]) / total * tokens[b, i].double() for i in left)
        assert isinstance(extra, Tensor)
        assert_near(made.extra_token[b, 0], extra)
        assert torch.equal(made.select_tokens[b], tokens[b, best])
        assert made.score_mask[b].tolist() == [float(i in best) for i in range(10)]


@torch.no_grad()
def test_aggregation_is_the_formula() -> None:
    aggregate = TokenAggregation(dim=20, keeped_patches=3, dim_ratio=0.2).eval()
    aggregate.scale.fill_(1.7)
    tokens = drawn(2, 6, 20)
    made, exact = aggregate(tokens), in_float64(aggregate.weight)
    for b in range(2):
        logits = 1.7 * exact(tokens[b].double())  # (6, 3)
        for j in range(3):
            powers = [math.exp(float(logits[i, j])) for i in range(6)]
            expected = sum(power / sum(powers) * tokens[b, i].double() for i, power in enumerate(powers))
            assert isinstance(expected, Tensor)
            assert_near(made[b, j], expected)


def test_names_and_defaults_of_the_published_modules() -> None:
    made = TokenAggregation(dim=512, keeped_patches=26, dim_ratio=0.2)
    assert [tuple(p.shape) for p in made.weight.parameters()][2:] == [(102, 512), (102,), (26, 102), (26,)]
    assert made.scale.shape == (1, 1, 1) and tokensieve.TokenAggregation is TokenAggregation
    assert TokenAggregation()(drawn(2, 64, 512)).shape == (2, 26, 512)
    assert tokensieve.TokenSparse()(drawn(2, 128, 512), drawn(2, 512)).select_tokens.shape == (2, 64, 512)


@pytest.mark.parametrize(("patches", "selected", "left"), [(128, 64, 26), (196, 98, 40), (77, 39, 16), (50, 25, 11), (6, 3, 2)])
def test_counts(patches: int, selected: int, left: int) -> None:
    part = Sdtps(16, patches).eval()
    tokens = drawn(2, patches, 16)
    reduction = sdtps(view_of(tokens, drawn(2, 16, seed=1), part), part.budget("out"))
    assert part.budget("out") == left and reduction.anchors is not None
    assert reduction.apply(tokens).shape == (2, left, 16) and reduction.anchors.shape == (2, selected)


@torch.no_grad()
def test_the_method_is_both_modules_one_after_the_other() -> None:
    part = Sdtps(16, 20).eval()
    tokens, own = drawn(3, 20, 16), drawn(3, 16, seed=1)
    sparse, aggregate = part.weights_of("")
    found = sparse(tokens, own)
    expected = torch.cat([aggregate(found.select_tokens), found.extra_token], dim=1)
    assert_near(sdtps(view_of(tokens, own, part), part.keep).apply(tokens), expected)


@torch.no_grad()
def test_other_modalities_guide_wherever_they_come_from() -> None:
    part = Sdtps(16, 20, modalities=MODALITIES).eval()
    tokens, own = drawn(6, 20, 16), drawn(6, 16, seed=1)  # two objects, modality after modality
    together = sdtps(view_of(tokens, own, part, modalities=MODALITIES), part.keep)
    for m, name in enumerate(MODALITIES):
        rows = slice(2 * m, 2 * m + 2)
        others = torch.stack([own[2 * o : 2 * o + 2] for o in range(3) if o != m], dim=1)  # (B, 2, D)
        alone = sdtps(view_of(tokens[rows], own[rows], part, modalities=(name,), others=others), part.keep)
        assert_near(alone.as_weight(), together.as_weight()[rows])
        nobody = sdtps(view_of(tokens[rows], own[rows], part, modalities=(name,)), part.keep)
        assert nobody.scores is not None and alone.scores is not None and not torch.allclose(nobody.scores, alone.scores)


@torch.no_grad()
def test_one_other_modality_counts_for_two() -> None:
    sparse = TokenSparse(dim=16)
    tokens, own, other = drawn(2, 10, 16), drawn(2, 16, seed=1), drawn(2, 1, 16, seed=2)
    assert_near(sparse.score(tokens, own, other), sparse.score(tokens, own, other.repeat(1, 2, 1)))


@pytest.mark.parametrize("gumbel", [False, True])
def test_every_weight_learns(gumbel: bool) -> None:
    """With Gumbel and without it, from the first step; the score's MLP also through the choice alone."""
    part = Sdtps(16, 32, gumbel=gumbel).train()
    tokens = drawn(2, 32, 16)
    reduction = sdtps(view_of(tokens, drawn(2, 16, seed=1), part), part.keep)
    made = reduction.apply(tokens)
    (made[:, :-1] * drawn(2, part.keep - 1, 16, seed=2)).sum().backward()  # not through the extra token
    for name, parameter in part.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("gumbel", [False, True])
def test_gradients_stay_bounded(gumbel: bool) -> None:
    """The mask (1 - D) * 1e10 on the logits would make them some 1e10 times as large."""
    torch.manual_seed(0)
    part = Sdtps(16, 32, gumbel=gumbel).train()
    for seed in range(5):
        tokens = (10 * drawn(2, 32, 16, seed=seed)).requires_grad_()
        reduction = sdtps(view_of(tokens, drawn(2, 16, seed=1), part), part.keep)
        part.zero_grad()
        reduction.apply(tokens).square().mean().backward()
        gradients = [p.grad for p in part.parameters() if p.grad is not None] + [tokens.grad]
        assert all(float(g.abs().max()) < 1e3 for g in gradients if g is not None)


@pytest.mark.slow
def test_training_improves_the_choice() -> None:
    """The pooled tokens shall be near what four informative patches say: the scores of those rise, with either gate."""
    for gumbel in (False, True):
        torch.manual_seed(0)
        part = Sdtps(8, 16, beta=0.0, gumbel=gumbel).train()
        rate = torch.optim.Adam(part.parameters(), lr=0.02)
        marked = torch.tensor([1, 5, 8, 14])
        kept = []
        for step in range(100):
            tokens = 0.3 * drawn(16, 16, 8, seed=step)
            tokens[:, marked, 0] += 2.0  # what is wanted is in these
            view = View(tokens, tokens.mean(1, keepdim=True), grid=None, part=part, seed=step)
            reduction = sdtps(view, part.keep)
            assert reduction.anchors is not None
            pooled = reduction.apply(tokens)[:, :-1].mean(1)
            loss = (pooled[:, 0] - 2.0).square().mean()
            rate.zero_grad()
            loss.backward()
            rate.step()
            kept.append(float(torch.isin(reduction.anchors, marked).float().sum(1).mean()))
        assert sum(kept[-10:]) / 10 > max(3.5, sum(kept[:10]) / 10), gumbel


def test_the_decision_is_hard_forward_and_soft_backward() -> None:
    sparse = TokenSparse(dim=8, use_gumbel=True, tau=0.7).train()
    tokens, noise = drawn(2, 12, 8), torch.rand(2, 12, generator=torch.Generator().manual_seed(3))
    made = sparse(tokens, drawn(2, 8, seed=1), noise=noise)
    assert set(made.score_mask.unique().tolist()) == {0.0, 1.0}
    toward = drawn(2, 12, seed=4)
    (slope,) = torch.autograd.grad((made.score_mask * toward).sum(), made.scores, retain_graph=True)
    scores = made.scores.detach().requires_grad_()
    gumbel = -(-noise.clamp(1e-6, 1 - 1e-6).log()).log()
    (6 * ((scores + gumbel) / 0.7).softmax(-1) * toward).sum().backward()  # 6 of 12 are kept
    assert scores.grad is not None
    assert_near(slope, scores.grad)


def test_noise_is_of_training_only() -> None:
    """It is in the slope of the decision; what goes on is decided by the scores alone."""
    part = Sdtps(8, 16, gumbel=True)
    tokens, own, toward = drawn(2, 16, 8), drawn(2, 8, seed=1), drawn(2, 16, 8, seed=2)[:, : part.keep]

    def slope(seed: int) -> tuple[Tensor, Tensor]:
        part.zero_grad()
        made = sdtps(View(tokens, own[:, None], grid=None, part=part, seed=seed), part.keep).apply(tokens)
        (made * toward).sum().backward()
        gradient = part.sparse["all"].score_predictor[0].weight.grad  # type: ignore[index,union-attr]
        return made.detach(), gradient.clone()  # type: ignore[union-attr]

    part.train()
    (made, first), (again, other) = slope(0), slope(1)
    assert torch.equal(made, again) and not torch.allclose(first, other)
    part.eval()
    (made, first), (again, other) = slope(0), slope(1)
    assert torch.equal(made, again) and torch.equal(first, other)


def slow_merge(part: Sdtps, tokens: Tensor, scores: list[float], sizes: list[float]) -> tuple[Tensor, Tensor]:
    """W (K-1, N) and the sizes (K-1,) of one image with aggregation=merge, entry by entry in float64."""
    aggregate = part.weights_of("")[1]
    k, n, tokens = part.keep - 1, len(tokens), tokens.double()
    seeds = [max(range(n), key=lambda i: scores[i])]
    norms = tokens.norm(dim=1)
    clipped = tokens * (CLIP * norms.median() / norms).clamp_max(1.0)[:, None]
    while len(seeds) < k:
        apart = [min(float((clipped[i] - clipped[seed]).norm()) for seed in seeds) for i in range(n)]
        seeds.append(max((i for i in range(n) if i not in seeds), key=lambda i: apart[i]))
    seeds.sort()
    prior = torch.full((k, n), EPSILON / k, dtype=torch.float64)
    for i in range(n):
        similar = [float(tokens[i] @ tokens[seed] / norms[i] / norms[seed]) for seed in seeds]
        prior[seeds.index(i) if i in seeds else similar.index(max(similar)), i] += 1 - EPSILON
    logits = float(aggregate.scale) * in_float64(aggregate.weight)(tokens).T  # (K-1, N)
    weight = torch.zeros(k, n, dtype=torch.float64)
    for j in range(k):
        powers = [float(logits[j, i].exp() * prior[j, i]) * sizes[i] for i in range(n)]
        weight[j] = torch.tensor([power / sum(powers) for power in powers])
    mass = [sum(sizes[i] * float(weight[j, i] / weight[:, i].sum()) for i in range(n)) for j in range(k)]
    return weight, torch.tensor(mass, dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("merged", [False, True])
def test_the_merge_is_the_formula(merged: bool) -> None:
    part = Sdtps(16, 30, aggregation="merge").eval()
    for parameter in part.aggregate.parameters():
        parameter.copy_(0.3 * drawn(*parameter.shape, seed=parameter.numel()))
    tokens, own, others = drawn(2, 30, 16), drawn(2, 16, seed=1), drawn(2, 2, 16, seed=2)
    view = view_of(tokens, own, part, others=others)
    if merged:
        view = replace(view, sizes=torch.randint(1, 6, (2, 30), generator=torch.Generator().manual_seed(5)).float())
    reduction = sdtps(view, part.keep, aggregation="merge")
    selected = part.weights_of("")[0](tokens, own, others)
    assert reduction.weight is not None and reduction.sizes is not None
    for b in range(2):
        scores = slow_scores(part.weights_of("")[0], tokens[b], own[b], list(others[b]))
        weight, sizes = slow_merge(part, tokens[b], scores, view.sizes_or_ones()[b].tolist())
        assert_near(reduction.weight[b, :-1], weight)
        assert_near(reduction.sizes[b, :-1], sizes)
    assert torch.equal(reduction.weight[:, -1], selected.extra) and bool((reduction.sizes[:, -1] == 1).all())
    assert_near(reduction.sizes.sum(1), view.sizes_or_ones().sum(1) + 1)


@torch.no_grad()
def test_the_merge_of_an_image_does_not_depend_on_its_batch_and_is_safe_in_bf16() -> None:
    method = get_method("sdtps")
    for view in (make_view(), make_view(merged=True, seed=2)):
        part = Sdtps(view.tokens.shape[2], view.n, aggregation="merge").eval()
        view = replace(view, part=part)
        before = view.tokens.clone()
        made = method.decide(view, part.keep, aggregation="merge")
        assert torch.equal(view.tokens, before)
        for b in range(len(before)):
            alone = method.decide(one_image(view, b), part.keep, aggregation="merge")
            assert torch.equal(alone.index[0], made.index[b])
            assert_near(alone.as_weight()[0], made.as_weight()[b])
    view = make_view(dtype=torch.bfloat16, seed=3)
    part = Sdtps(view.tokens.shape[2], view.n, aggregation="merge").eval()
    out = method.decide(replace(view, part=part), part.keep, aggregation="merge").apply(view.tokens)
    assert out.dtype == torch.bfloat16 and bool(torch.isfinite(out).all())


@torch.no_grad()
def test_training_of_a_merge_starts_from_the_merge() -> None:
    """A new part gives, up to epsilon, the means of the groups around its seeds, and their sizes."""
    part = Sdtps(16, 30, aggregation="merge").eval()
    tokens, own = drawn(2, 30, 16), drawn(2, 16, seed=1)
    reduction = sdtps(view_of(tokens, own, part), part.keep, aggregation="merge")
    first = part.weights_of("")[0].score(tokens, own).argmax(1)
    index, groups = farthest_points(tokens, part.keep - 1, CLIP, first)
    plain = Reduction.merge(groups, index, torch.ones(2, 30))
    assert torch.equal(reduction.index[:, :-1], index) and torch.equal(reduction.groups, groups)
    assert float((reduction.as_weight()[:, :-1] - plain.as_weight()).abs().max()) < 3 * EPSILON
    assert reduction.sizes is not None and plain.sizes is not None
    assert float((reduction.sizes[:, :-1] - plain.sizes).abs().max()) < 3 * EPSILON * 30


def test_every_weight_of_a_merge_learns() -> None:
    """The last layer at once; what is before it, once that has left 0. The score learns by the extra token, sizes by all."""
    torch.manual_seed(0)
    part = Sdtps(16, 32, aggregation="merge").train()
    tokens, rate = drawn(2, 32, 16), torch.optim.SGD(part.parameters(), lr=0.1)
    for _ in range(2):
        rate.zero_grad()
        reduction = sdtps(view_of(tokens, drawn(2, 16, seed=1), part), part.keep, aggregation="merge")
        (reduction.apply(tokens) * drawn(2, part.keep, 16, seed=2)).sum().backward()
        rate.step()
    for name, parameter in part.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert reduction.sizes is not None and reduction.sizes.requires_grad
    with pytest.raises(UserError, match="turn Gumbel off"):
        Sdtps(16, 32, gumbel=True, aggregation="merge")


def test_a_merge_inside_a_backbone_passes_its_sizes_on() -> None:
    settings = Settings(
        "timm",
        "vit_tiny_patch16_224",
        (128, 64),
        arguments={"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
        plan="sdtps@1(aggregation=merge)",
    )
    model = build(settings).eval()
    inputs = {name: drawn(2, 3, 128, 64, seed=i) for i, name in enumerate(MODALITIES)}
    with torch.no_grad(), tokensieve.apply(model, model.plan) as handle:
        model.encode(inputs)
    ((_, reduction),) = handle.stages
    assert [(row.tokens_in, row.tokens_out) for row in handle.ledger] == [(128, 26)]
    assert reduction.sizes is not None and adds_up(reduction.sizes)
    with (
        pytest.raises(UserError, match=r"trained with aggregation=merge; write sdtps\(aggregation=merge\)"),
        torch.no_grad(),
        tokensieve.apply(model, "sdtps@1"),
    ):
        model.encode(inputs)


def adds_up(sizes: Tensor) -> bool:
    """All 128 patches, and 1 for the extra token."""
    return bool(((sizes.sum(1) - 129).abs() < 1e-2).all())


@pytest.mark.parametrize("aggregation", ["mix", "merge"])
def test_equal_patches_do_no_harm(aggregation: Literal["mix", "merge"]) -> None:
    part = Sdtps(8, 16, aggregation=aggregation).train()
    tokens = torch.ones(2, 16, 8, requires_grad=True)
    made = sdtps(view_of(tokens, torch.ones(2, 8), part), part.keep, aggregation=aggregation).apply(tokens)
    made.sum().backward()
    assert torch.isfinite(made).all() and torch.isfinite(tokens.grad).all()  # type: ignore[arg-type]


def test_mistakes_are_told() -> None:
    part = Sdtps(8, 20, modalities=MODALITIES)
    view = view_of(drawn(2, 20, 8), drawn(2, 8), part)
    with pytest.raises(UserError, match="the modality of the images is not known"):
        sdtps(view, part.keep)
    with pytest.raises(UserError, match="not the same number"):
        sdtps(view_of(drawn(4, 20, 8), drawn(4, 8), part, modalities=MODALITIES), part.keep)
    with pytest.raises(UserError, match="write sdtps:5"):
        sdtps(view, 7)
    with pytest.raises(UserError, match="leave no token"):
        Sdtps(8, 3)
    for wrong in ({"sparse_ratio": 0.0}, {"sparse_ratio": 1.0}, {"beta": 0.7}, {"tau": 0.0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            TokenSparse(8, **wrong)


@pytest.mark.parametrize("patches", [128, 196])
@pytest.mark.parametrize("sparse_ratio", [0.3, 0.5, 0.7])
def test_the_advice_for_another_count_gives_that_count(patches: int, sparse_ratio: float) -> None:
    part = Sdtps(8, patches, sparse_ratio=sparse_ratio)
    for keep in (2, 10, 26, 40, 65, 100, patches - 1):
        words = part.retraining_for(keep).rpartition("CONFIG ")[2].split()
        ratios = dict(zip(words[::2], map(float, words[1::2]), strict=True))
        sparse = ratios.get("MODEL.SDTPS_SPARSE_RATIO", sparse_ratio)
        assert Sdtps(8, patches, sparse_ratio=sparse, aggr_ratio=ratios["MODEL.SDTPS_AGGR_RATIO"]).keep == keep
    assert part.retraining_for(1) == f"SDTPS leaves 2 to {patches} tokens of {patches}"


def test_a_plan_with_another_count_says_which_keys_to_train_with() -> None:
    settings = Settings(
        "timm",
        "vit_tiny_patch16_224",
        (128, 64),
        arguments={"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
        plan="sdtps@out",
    )
    with pytest.raises(
        UserError, match=r"leave the number out, or for 10 tokens train it again with MODEL.SDTPS_AGGR_RATIO 0.141"
    ):
        tokensieve.apply(build(settings), "sdtps@out:10")


def test_it_keeps_to_the_contract_of_methods() -> None:
    check_method("sdtps")


def test_on_a_stock_model_with_the_others_in_the_context() -> None:
    """Three passes of one tower, each told of the other modalities' global features."""
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=(64, 32), patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0
    ).eval()
    part = Sdtps(32, 32, modalities=MODALITIES).eval()
    images, others = drawn(2, 3, 64, 32), drawn(2, 2, 32, seed=1)
    context = {"modalities": ("NI",), "others": others}
    with torch.no_grad(), tokensieve.apply(model, "sdtps@1", weights={"sdtps": part}, context=context) as handle:
        model(images)
    assert [(row.tokens_in, row.tokens_out) for row in handle.ledger] == [(32, part.keep)]


def test_a_square_count_is_not_needed_to_know_the_class_token() -> None:
    """16 x 8 = 128 patches, 129 tokens: the one more is CLS, whatever the root of 128 is."""
    settings = Settings(
        "timm",
        "vit_tiny_patch16_224",
        (128, 64),
        arguments={"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
        plan="sdtps@out",
    )
    model = build(settings).eval()
    assert model.grid == (16, 8)
    with torch.no_grad(), tokensieve.apply(model, model.plan) as handle:
        model.encode({name: drawn(2, 3, 128, 64) for name in MODALITIES})
    assert [(row.tokens_in, row.tokens_out) for row in handle.ledger] == [(128, 26)]
    assert handle.kept is not None and handle.kept.shape == (6, 26)
