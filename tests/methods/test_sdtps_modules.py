"""TokenSparse, TokenAggregation and MultiModalSDTPS as their authors call them, against slow formulas in numpy."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tests.support.reference import assert_clear
from tests.support.rounding import assert_near
from tokensieve.errors import UserError
from tokensieve.methods.sdtps_modules import MultiModalSDTPS, Sparse, SparseTokens, TokenAggregation, TokenSparse

Array = np.ndarray


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numpy_of(value: Tensor) -> Array:
    return value.detach().double().numpy()


def linear(layer: nn.Module, x: Array) -> Array:
    return x @ numpy_of(layer.weight).T + numpy_of(layer.bias)  # type: ignore[arg-type]


def gelu(x: Array) -> Array:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def scaled(row: Array) -> Array:
    return (row - row.min()) / (row.max() - row.min())


def cosines(tokens: Array, feature: Array) -> Array:
    return np.array([v @ feature / np.sqrt((v @ v) * (feature @ feature)) for v in tokens])


def slow_sparse(
    sparse: TokenSparse, tokens: Array, own: Array, m2: Array, m3: Array, beta: float
) -> tuple[list[int], Array, Array]:
    """The kept tokens, the extra token and the scores of one image, from similarities (N,)."""
    first, _, last = sparse.score_predictor
    learned = 1 / (1 + np.exp(-linear(last, gelu(linear(first, tokens)))[:, 0]))
    scores = (1 - 2 * beta) * learned + beta * (scaled(m2) + scaled(m3) + 2 * scaled(own))
    kept = sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[: math.ceil(sparse.sparse_ratio * len(scores))])
    assert_clear(list(scores), kept)
    left = [i for i in range(len(scores)) if i not in kept]
    weights = np.exp(scores[left]) / np.exp(scores[left]).sum()
    return kept, sum(w * tokens[i] for w, i in zip(weights, left, strict=True)), scores


def slow_aggregate(aggregate: TokenAggregation, x: Array, mask: Array | None = None) -> Array:
    """sum_i W_ji v_i of one image (S, C); tokens whose mask is 0 get a logit of minus infinity."""
    norm, first, _, last = aggregate.weight
    centred = x - x.mean(1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(1, keepdims=True) + norm.eps)  # type: ignore[union-attr]
    normal = normal * numpy_of(norm.weight) + numpy_of(norm.bias)  # type: ignore[union-attr,arg-type]
    logits = float(aggregate.scale) * linear(last, gelu(linear(first, normal))).T  # (K, S)
    if mask is not None:
        logits = np.where(mask > 0, logits, -np.inf)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ x


@torch.no_grad()
def test_token_sparse_as_its_authors_call_it() -> None:
    sparse = TokenSparse(embed_dim=16, sparse_ratio=0.5, use_gumbel=False, gumbel_tau=1.0).eval()
    tokens = drawn(3, 10, 16)
    attention = [drawn(3, 10, seed=seed) for seed in (1, 2, 3)]
    for made in (
        sparse(tokens, *attention, beta=0.2),
        sparse(
            tokens=tokens,
            self_attention=attention[0],
            cross_attention_m2=attention[1],
            cross_attention_m3=attention[2],
            beta=0.2,
        ),
    ):
        select_tokens, extra_token, score_mask, selected_mask, keep_indices = made
        assert isinstance(made, SparseTokens)
        assert made._fields == ("select_tokens", "extra_token", "score_mask", "selected_mask", "keep_indices")
        for b in range(3):
            kept, extra, _ = slow_sparse(sparse, numpy_of(tokens[b]), *(numpy_of(row[b]) for row in attention), beta=0.2)
            assert keep_indices[b].tolist() == kept
            assert torch.equal(select_tokens[b], tokens[b, kept])
            assert_near(extra_token[b, 0], torch.from_numpy(extra))
            assert score_mask[b].tolist() == [float(i in kept) for i in range(10)]
            assert selected_mask[b].tolist() == [1.0] * 5


@torch.no_grad()
def test_both_forms_of_token_sparse_are_one_selection() -> None:
    """Cosines handed in are the cosines that it computes; also where there are as many tokens as channels."""
    sparse = TokenSparse(embed_dim=12, beta=0.3).eval()
    tokens, own, others = drawn(2, 12, 12), drawn(2, 12, seed=1), drawn(2, 2, 12, seed=2)
    by_features = sparse(tokens, own, others)
    assert isinstance(by_features, Sparse)
    rows = [
        torch.from_numpy(np.stack([cosines(numpy_of(tokens[b]), numpy_of(feature[b])) for b in range(2)])).float()
        for feature in (own, others[:, 0], others[:, 1])
    ]
    by_attention = sparse(tokens, *rows)
    assert torch.equal(by_attention.keep_indices, by_features.index)
    assert_near(by_attention.extra_token, by_features.extra_token)


def test_constructors_of_today_and_of_the_authors() -> None:
    positional = TokenSparse(32, 0.6, True, 0.7)
    assert (positional.sparse_ratio, positional.use_gumbel, positional.tau, positional.beta) == (0.6, True, 0.7, 0.25)
    named = TokenSparse(dim=32, sparse_ratio=0.6, beta=0.1, use_gumbel=True, tau=0.7)
    assert (named.sparse_ratio, named.use_gumbel, named.tau, named.beta) == (0.6, True, 0.7, 0.1)
    assert positional.score_predictor[0].in_features == named.score_predictor[0].in_features == 32
    with pytest.raises(UserError, match="write beta="):
        TokenSparse(32, 0.6, 0.25)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="gumbel_mass=ones is not one of kept, one"):
        TokenSparse(32, gumbel_mass="ones")
    arguments = list(inspect.signature(MultiModalSDTPS).parameters)
    expected = ["embed_dim", "num_patches", "sparse_ratio", "aggr_ratio", "use_gumbel", "gumbel_tau", "beta", "dim_ratio"]
    assert arguments == expected and tokensieve.MultiModalSDTPS is MultiModalSDTPS


def test_similarities_of_another_length_are_an_error() -> None:
    sparse = TokenSparse(8)
    with pytest.raises(UserError, match=r"cross_attention_m3 has one number for each token, \(2, 10\), not \(2, 9\)"):
        sparse(drawn(2, 10, 8), drawn(2, 10), drawn(2, 10), drawn(2, 9))
    with pytest.raises(UserError, match=r"beta=0\.7 is outside"):
        sparse(drawn(2, 10, 8), drawn(2, 10), drawn(2, 10), drawn(2, 10), beta=0.7)


@torch.no_grad()
def test_aggregation_takes_the_mask_of_the_selected_and_that_of_all_tokens() -> None:
    sparse, aggregate = TokenSparse(16).eval(), TokenAggregation(16, keeped_patches=3).eval()
    aggregate.scale.fill_(1.4)
    tokens = drawn(2, 10, 16)
    found = sparse(tokens, *(drawn(2, 10, seed=seed) for seed in (1, 2, 3)))
    plain = aggregate(x=found.select_tokens)
    for b in range(2):
        assert_near(plain[b], torch.from_numpy(slow_aggregate(aggregate, numpy_of(found.select_tokens[b]))))
    assert_near(aggregate(found.select_tokens, keep_policy=found.selected_mask), plain)
    assert_near(aggregate(found.select_tokens, keep_policy=found.score_mask), plain)
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0, 1.0]])
    masked = aggregate(found.select_tokens, mask)
    for b in range(2):
        expected = slow_aggregate(aggregate, numpy_of(found.select_tokens[b]), numpy_of(mask[b]))
        assert_near(masked[b], torch.from_numpy(expected))


def test_the_gradient_of_a_mask_of_all_tokens_reaches_the_kept_ones() -> None:
    aggregate = TokenAggregation(8, keeped_patches=2)
    tokens, mask = drawn(2, 6, 8), torch.tensor([[1.0, 0, 1, 0, 0, 1], [0, 1, 1, 1, 0, 0]], requires_grad=True)
    kept = torch.stack([tokens[b, mask[b].bool()] for b in range(2)])
    of_all = (aggregate(kept, mask) * drawn(2, 2, 8, seed=1)).sum()
    (slope,) = torch.autograd.grad(of_all, mask)
    short = torch.ones(2, 3, requires_grad=True)
    (expected,) = torch.autograd.grad((aggregate(kept, short) * drawn(2, 2, 8, seed=1)).sum(), short)
    assert_near(slope[mask.bool()].reshape(2, 3), expected)
    assert not slope[~mask.bool()].any()


def test_a_mask_that_fits_neither_is_an_error() -> None:
    aggregate, x = TokenAggregation(8, keeped_patches=2), drawn(2, 3, 8)
    with pytest.raises(UserError, match=r"give the mask of these tokens, \(2, 3\)"):
        aggregate(x, torch.ones(2, 6))
    with pytest.raises(UserError, match=r"keep_policy is \(3, 6\)"):
        aggregate(x, torch.ones(3, 6))


@torch.no_grad()
def test_three_modalities_at_once() -> None:
    torch.manual_seed(0)
    module = MultiModalSDTPS(embed_dim=16, num_patches=20, beta=0.2, dim_ratio=0.5).eval()
    patches = [drawn(2, 20, 16, seed=seed) for seed in range(3)]
    features = [drawn(2, 16, seed=seed) for seed in range(3, 6)]
    made = module(*patches, *features)
    assert len(made) == 6
    for m, name in enumerate(("rgb", "nir", "tir")):
        sparse, aggregate = module.get_submodule(f"{name}_sparse"), module.get_submodule(f"{name}_aggr")
        assert isinstance(sparse, TokenSparse) and isinstance(aggregate, TokenAggregation)
        others = [features[o] for o in range(3) if o != m]
        for b in range(2):
            tokens = numpy_of(patches[m][b])
            rows = [cosines(tokens, numpy_of(feature[b])) for feature in (features[m], *others)]
            kept, extra, _ = slow_sparse(sparse, tokens, *rows, beta=0.2)
            expected = np.concatenate([slow_aggregate(aggregate, tokens[kept]), extra[None]])
            assert_near(made[m][b], torch.from_numpy(expected))
            assert made[3 + m][b].tolist() == [float(i in kept) for i in range(20)]
    again = module(*patches, *(feature[:, None] for feature in features))  # (B, 1, C) too
    assert all(torch.equal(a, b) for a, b in zip(made, again, strict=True))


def test_sizes_and_weight_names_of_three_modalities() -> None:
    module = MultiModalSDTPS()
    made = module(*(drawn(2, 128, 512, seed=s) for s in range(3)), *(drawn(2, 512, seed=s) for s in range(3)))
    assert [tuple(value.shape) for value in made] == [(2, 26, 512)] * 3 + [(2, 128)] * 3
    names = {
        f"{modality}_{rest}"
        for modality in ("rgb", "nir", "tir")
        for rest in (
            *("sparse.score_predictor.0.weight", "sparse.score_predictor.0.bias"),
            *("sparse.score_predictor.2.weight", "sparse.score_predictor.2.bias", "aggr.scale"),
            *(f"aggr.weight.{layer}.{kind}" for layer in (0, 1, 3) for kind in ("weight", "bias")),
        )
    }
    assert set(module.state_dict()) == names
    sum(value.square().mean() for value in made[:3]).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


@pytest.mark.parametrize(("mass", "factor"), [("kept", 6.0), ("one", 1.0)])
def test_the_slope_of_gumbel_has_the_mass_that_is_asked_for(mass: str, factor: float) -> None:
    sparse = TokenSparse(8, 0.5, True, 0.7, gumbel_mass=mass).eval()  # without noise
    made = sparse(drawn(2, 12, 8), drawn(2, 8, seed=1))
    toward = drawn(2, 12, seed=4)
    (slope,) = torch.autograd.grad((made.score_mask * toward).sum(), made.scores)
    scores = made.scores.detach().requires_grad_()
    (factor * (scores / 0.7).softmax(-1) * toward).sum().backward()
    assert scores.grad is not None
    assert_near(slope, scores.grad)
