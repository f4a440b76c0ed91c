"""Probabilities with a budget: their sum, their limit, and their gradient against finite differences."""

import pytest
import torch

from tokensieve.methods.soft_mask import budgeted, undecided


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [5.0, 1.0, 0.1, 1e-3, 1e-9])
def test_the_sum_is_the_budget_at_every_temperature(temperature):
    logits, present = 3 * drawn(4, 30), drawn(4, 30, seed=1).sigmoid()
    for keep in (1, 4, 13):
        torch.testing.assert_close(budgeted(logits, keep, temperature).sum(-1), torch.full((4,), float(keep)).double())
        counted = (present * budgeted(logits, keep, temperature, present)).sum(-1)
        torch.testing.assert_close(counted, torch.full((4,), float(min(keep, 13))).double())


def test_order_and_limit():
    logits = drawn(3, 20)
    soft = budgeted(logits, 6, 1.0)
    assert torch.equal(soft.argsort(-1), logits.argsort(-1))
    best = torch.zeros_like(logits).scatter(1, logits.topk(6).indices, 1.0)
    torch.testing.assert_close(budgeted(logits, 6, 1e-6), best)
    torch.testing.assert_close(budgeted(logits + 100, 6, 1.0), soft)  # their level does not matter
    half = budgeted(logits.half(), 6, 1.0)
    assert half.dtype == torch.float16


def test_with_no_more_tokens_than_the_budget_all_are_kept():
    logits, present = drawn(2, 8), torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0]).double().expand(2, -1)
    assert (budgeted(logits, 3, 0.5, present) > 1 - 1e-12).all()
    assert (budgeted(logits, 8, 0.5) > 1 - 1e-12).all()


def test_the_gradient_goes_through_the_threshold():
    """Against finite differences in float64, of the logits and of the probabilities of being there."""
    logits, present = drawn(2, 7).requires_grad_(), drawn(2, 7, seed=1).sigmoid().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, w: budgeted(a, 2, 0.7, w), (logits, present), eps=1e-6, atol=1e-6)
    soft = budgeted(logits, 2, 0.7)
    (level,) = torch.autograd.grad(soft.sum(), logits)
    torch.testing.assert_close(level, torch.zeros_like(level), atol=1e-12, rtol=0)  # the sum is fixed


def test_gradients_stay_finite_when_the_masks_are_hard():
    logits = drawn(2, 9).requires_grad_()
    budgeted(logits, 4, 1e-9).square().sum().backward()
    assert logits.grad.isfinite().all()


def test_undecided_falls_to_0_as_the_masks_become_hard():
    logits = drawn(3, 20).requires_grad_()
    values = [float(undecided(budgeted(logits, 5, temperature)).detach()) for temperature in (100.0, 1.0, 0.1, 1e-6)]
    assert values[0] == pytest.approx(1 - 5 / 20, abs=1e-3) and values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(0.0, abs=1e-6)
    undecided(budgeted(logits, 5, 1.0)).backward()
    assert (logits.grad.gather(1, logits.topk(1).indices) < 0).all()  # a larger best logit decides more
