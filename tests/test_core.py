"""Reductions: all forms carry any tensor through, compose, and keep account of sizes."""

from dataclasses import replace

import pytest
import torch

from tests.support.rounding import assert_near
from tokensieve import Reduction
from tokensieve.methods.registry import get_method
from tokensieve.scoring import noise
from tokensieve.testing import decide, make_view

B, N = 2, 12


def selection(k, n=N, seed=0):
    g = torch.Generator().manual_seed(seed)
    return Reduction.keep(torch.stack([torch.randperm(n, generator=g)[:k] for _ in range(B)]), n)


def merging(k, n=N, seed=0, sizes=None):
    g = torch.Generator().manual_seed(seed)
    groups = torch.cat([torch.arange(k).expand(B, -1), torch.randint(-1, k, (B, n - k), generator=g)], dim=1)
    return Reduction.merge(groups, torch.arange(k).expand(B, -1), torch.ones(B, n) if sizes is None else sizes)


def mixing(k, n=N, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.rand((B, k, n), generator=g) * (torch.rand((B, k, n), generator=g) < 0.4) + torch.eye(k, n)
    return Reduction(torch.arange(k).expand(B, -1), n, weight=weight / weight.sum(-1, keepdim=True))


KINDS = {"selection": selection, "merge": merging, "mixture": mixing}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(B, N), (B, N, 3), (B, N, 2, 3)])
def test_apply_is_the_matrix_product(kind, shape):
    reduction, x = KINDS[kind](5), torch.randn(shape)
    slow = torch.einsum("bkn,bn...->bk...", reduction.as_weight().double(), x.double())
    assert_near(reduction.apply(x), slow)
    assert reduction.is_selection == (kind == "selection")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [0.0, 2.0])
def test_a_prefix_stays_as_it_is(kind, norm):
    reduction, x = replace(KINDS[kind](5), norm=norm), torch.randn(B, 2 + N, 3)
    out = reduction.apply(x, prefix=2)
    assert torch.equal(out[:, :2], x[:, :2])
    assert torch.equal(out[:, 2:], reduction.apply(x[:, 2:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_merge_in_half_precision_is_that_of_float32_rounded_once(dtype):
    reduction, x = merging(5), torch.randn(B, N, 8).to(dtype)
    assert torch.equal(reduction.apply(x, 0), reduction.apply(x.float()).to(dtype))


@pytest.mark.parametrize("kind", ["selection", "merge"])
def test_an_empty_batch_stays_empty(kind):
    reduction = KINDS[kind](5).select_images(torch.arange(0))
    assert reduction.apply(torch.randn(0, 1 + N, 3), prefix=1).shape == (0, 6, 3)


def test_a_merge_stores_no_matrix():
    """Its memory grows with the number of tokens, not with its square."""
    n, k = 4096, 1024
    groups = torch.cat([torch.arange(k), torch.randint(0, k, (n - k,))])[None]
    reduction = Reduction.merge(groups, torch.arange(k)[None], torch.ones(1, n))
    both = reduction.then(Reduction.keep(torch.arange(0, k, 2)[None], k))
    for each in (reduction, both):
        tensors = [value for value in vars(each).values() if isinstance(value, torch.Tensor)]
        assert max(tensor.numel() for tensor in tensors) <= n


def test_the_gradient_of_a_merge_is_that_of_the_matrix_product():
    x, sizes = torch.randn(B, N, 3, requires_grad=True), torch.rand(B, N, requires_grad=True)
    out = merging(4, sizes=sizes + 1).apply(x)
    goal = torch.randn_like(out)
    fast = torch.autograd.grad((out * goal).sum(), (x, sizes))
    slow = torch.autograd.grad(((merging(4, sizes=sizes + 1).as_weight() @ x) * goal).sum(), (x, sizes))
    for one, other in zip(fast, slow, strict=True):
        assert_near(one, other)


def test_a_gate_interpolates_between_a_token_and_its_stand_in():
    x, gate = torch.randn(B, N, 3), torch.ones(B, 4, requires_grad=True)
    plain = merging(4)
    reduction = replace(plain, gate=gate, stand_in=torch.tensor([1, 2, 3, 0]).expand(B, -1))
    out, means = reduction.apply(x), plain.apply(x)
    assert torch.equal(out, means)
    (slope,) = torch.autograd.grad(out.sum(), gate)
    assert_near(slope, (means - means[:, [1, 2, 3, 0]]).sum(-1))
    assert_near(reduction.as_weight() @ x, means)


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_then_is_one_after_the_other(one, other):
    first = KINDS[one](8)
    options = {"sizes": first.sizes_after(None)} if other == "merge" else {}
    second = KINDS[other](3, n=8, seed=1, **options)
    x = torch.randn(B, N, 4)
    both = first.then(second)
    torch.testing.assert_close(both.apply(x), second.apply(first.apply(x)))
    assert both.n == N and both.k == 3
    torch.testing.assert_close(both.index, first.index.gather(1, second.index))
    if "mixture" in (one, other):
        return
    for b in range(B):  # follow every patch by hand
        for i in range(N):
            one = first.groups[b, i]
            assert both.groups[b, i] == (-1 if one < 0 else second.groups[b, one])


def test_zero_fill_keeps_length_and_places():
    reduction, x = selection(4), torch.randn(B, N, 3)
    filled = reduction.zero_fill(x)
    for b in range(B):
        for i in range(N):
            assert torch.equal(filled[b, i], x[b, i] if i in reduction.index[b] else torch.zeros(3))


def test_merge_is_the_size_weighted_mean_and_conserves_sizes():
    sizes = torch.randint(1, 6, (B, N)).float()
    reduction, x = merging(4, sizes=sizes), torch.randn(B, N, 3)
    out = reduction.apply(x)
    for b in range(B):
        for k in range(4):
            members = [i for i in range(N) if reduction.groups[b, i] == k]
            mass = sum(sizes[b, i] for i in members)
            torch.testing.assert_close(out[b, k], sum(sizes[b, i] * x[b, i] for i in members) / mass)
            assert reduction.sizes[b, k] == mass


def test_merge_of_equal_tokens_keeps_their_norm():
    x = torch.randn(B, 1, 3).expand(-1, N, -1)
    torch.testing.assert_close(merging(4).apply(x), x[:, :4])


def test_rest_merge_joins_the_most_similar_kept_token():
    view = make_view(merged=True)
    random = get_method("random")
    chosen, with_rest = decide(random, view, 6), decide(random, view, 6, "merge")
    kept = chosen.index
    for b in range(view.tokens.shape[0]):
        for i in range(view.n):
            cosines = [torch.cosine_similarity(view.tokens[b, i], view.tokens[b, j], dim=0) for j in kept[b]]
            nearest = kept[b].tolist().index(i) if i in kept[b] else int(torch.stack(cosines).argmax())
            assert with_rest.groups[b, i] == nearest
    torch.testing.assert_close(with_rest.sizes.sum(-1), view.sizes.sum(-1))


def test_rest_fuse_is_one_more_token_by_softmax_of_scores():
    view, anchor = make_view(), get_method("anchor")
    chosen, with_rest = decide(anchor, view, 6), decide(anchor, view, 6, "fuse")
    out = with_rest.apply(view.tokens)
    for b in range(view.tokens.shape[0]):
        rest = [i for i in range(view.n) if i not in chosen.index[b]]
        worth = torch.stack([chosen.scores[b, i].exp() for i in rest])
        torch.testing.assert_close(out[b, -1], (worth / worth.sum()) @ view.tokens[b, rest])
        assert with_rest.sizes[b, -1] == len(rest)
        assert with_rest.index[b, -1] == rest[int(worth.argmax())]


def test_gate_passes_the_value_forward_and_the_gradient_to_the_scores():
    scores = torch.randn(B, N, requires_grad=True)
    index = scores.topk(5).indices
    soft = scores.sigmoid().gather(1, index)
    reduction = Reduction.keep(index, N, gate=1 + soft - soft.detach())
    x = torch.randn(B, N, 3)
    out = reduction.apply(x)
    torch.testing.assert_close(out, x.gather(1, reduction.index[..., None].expand(-1, -1, 3)))
    out.square().sum().backward()
    assert (scores.grad.gather(1, index) != 0).all()
    torch.testing.assert_close(reduction.then(selection(2, n=5)).apply(x), selection(2, n=5).apply(out))


def test_renamed_methods_keep_their_old_names_for_one_release():
    view, reduction = make_view(merged=True), merging(4)
    with pytest.warns(DeprecationWarning, match="View.summary is now View.global_token"):
        assert torch.equal(view.summary(), view.global_token())
    with pytest.warns(DeprecationWarning, match="View.size is now View.sizes_or_ones"):
        assert torch.equal(view.size(), view.sizes_or_ones())
    with pytest.warns(DeprecationWarning, match="Reduction.rows is now Reduction.select_images"):
        assert torch.equal(reduction.rows(torch.tensor([1])).index, reduction.index[1:])
    with pytest.warns(DeprecationWarning, match="Reduction.carry_sizes is now Reduction.sizes_after"):
        assert torch.equal(reduction.carry_sizes(None), reduction.sizes_after(None))


def test_noise_belongs_to_the_image_and_looks_uniform():
    all_at_once = noise(torch.arange(64), 300, seed=3)
    alone = torch.cat([noise(torch.tensor([i]), 300, seed=3) for i in range(64)])
    assert torch.equal(all_at_once, alone)
    assert not torch.equal(all_at_once, noise(torch.arange(64), 300, seed=4))
    assert all_at_once.min() >= 0 and all_at_once.max() < 1
    assert abs(all_at_once.mean() - 0.5) < 0.01 and abs(all_at_once.var() - 1 / 12) < 0.005
    flat = all_at_once - all_at_once.mean()
    assert abs((flat[:-1] * flat[1:]).mean()) < 0.003 and abs((flat[:, :-1] * flat[:, 1:]).mean()) < 0.003


def test_a_stack_of_images_with_different_numbers_of_tokens():
    """Outputs, inputs and everything known about them are padded; padding of the single images is left out."""
    first = Reduction.merge(torch.tensor([[0, 1, 0, 1, -1]]), torch.tensor([[0, 1]]), torch.ones(1, 5))
    first = replace(first, norm=1.0, carry=torch.arange(5.0)[None], prop_attn=False)
    padded = Reduction.keep_some(torch.tensor([[True, True, True], [False, True, False]])).select_images(torch.tensor([1]))
    second = replace(padded, norm=1.0, carry=torch.arange(3.0)[None], prop_attn=False)
    both = Reduction.stack([first, second])
    assert (both.n, both.k, both.counts.tolist(), both.norm, both.prop_attn) == (5, 2, [2, 1], 1.0, False)
    assert both.index.tolist() == [[0, 1], [1, 0]] and both.sizes.tolist() == [[2.0, 2.0], [1.0, 0.0]]
    assert both.groups.tolist() == [[0, 1, 0, 1, -1], [-1, 0, -1, -1, -1]]
    assert both.carry.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]]
    x = torch.randn(2, 5, 3)
    assert_near(both.apply(x)[0], first.apply(x[:1])[0].double())
    assert torch.equal(both.apply(x)[1, 0], x[1, 1])
    gated = replace(Reduction.keep(torch.tensor([[1]]), 3), gate=torch.full((1, 1), 2.0))
    assert torch.equal(Reduction.stack([gated, second]).apply(x[:, :3])[0, 0], 2 * x[0, 1])
