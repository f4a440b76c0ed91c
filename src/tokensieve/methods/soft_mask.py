"""Keep probabilities that add up to a budget: the soft form of "keep the K largest".

    p_i = sigmoid((a_i - tau) / T)    with one tau for each image, such that sum_i w_i p_i = K

w is the probability that a token is there at all. tau is found by bisection in float64. Its gradient follows from the equation:

    d tau / d a_i = w_i q_i / Q,    d tau / d w_i = p_i / Q    with q_i = p_i (1 - p_i) / T and Q = sum_i w_i q_i

As T goes to 0, the K largest a get 1 and the others 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 64  # halvings of the interval that holds tau
REACH = 50.0  # how many T the interval reaches beyond the logits: sigmoid(-50) is 2e-22


def budgeted(logits: Tensor, keep: float, temperature: Tensor | float, present: Tensor | None = None) -> Tensor:
    """Probabilities (B, N) of the dtype of logits (B, N), whose sum over the tokens that are present is keep.

    present: (B, N), the probability that each token is there; None: all are. Where their sum is at most keep, all get almost 1.
    """
    a = logits.double()
    t = torch.as_tensor(temperature, dtype=torch.float64, device=a.device)
    w = torch.ones_like(a) if present is None else present.double()
    with torch.no_grad():
        low, high = a.amin(-1, keepdim=True) - REACH * t, a.amax(-1, keepdim=True) + REACH * t  # (B, 1)
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            is_too_low = (w * ((a - middle) / t).sigmoid()).sum(-1, keepdim=True) > keep
            low, high = torch.where(is_too_low, middle, low), torch.where(is_too_low, high, middle)
        tau = (low + high) / 2
        p = ((a - tau) / t).sigmoid()
        slope = (w * p * (1 - p) / t).sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)  # Q
    count = (w * ((a - tau) / t).sigmoid()).sum(-1, keepdim=True)
    tau = tau + (count - count.detach()) / slope  # the value of before, with the gradient of the equation
    return ((a - tau) / t).sigmoid().to(logits.dtype)


def undecided(present: Tensor) -> Tensor:
    """How far probabilities (B, N) are from 0 and 1: 0 if all are one of these, 1 - K / N if all are K / N."""
    present = present.float()
    return (1 - present.square().sum(-1) / present.sum(-1)).mean()
