"""Muon: momentum whose every update is made orthogonal, so that all directions of a weight matrix learn equally fast.

After Jordan et al., 2024 ("Muon: an optimizer for hidden layers in neural networks"), with the scale of Liu et al., 2025
(arXiv:2502.16982): an update has the size an AdamW update would have, so both share one learning rate.
torch.optim.Muon orthogonalises in bfloat16, one matrix after the other, which on a CPU costs more than the
training step itself; here it is float32 and all matrices of a shape go at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.config.schema import Optimizer


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push every singular value of each matrix (..., rows, columns) towards 1, by Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For the 2-d weights of transformer blocks. Fused q, k, v weights (3 D, D) are taken as three matrices."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "Muon evaluates the loss once; it takes no closure"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape.setdefault(weight.shape, []).append(weight)
            for shape, weights in by_shape.items():
                self._update(group, shape, weights)

    def _update(self, group: dict[str, Any], shape: torch.Size, weights: list[Tensor]) -> None:
        rows, columns = shape
        directions = []
        for weight in weights:
            velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
            gradient: Tensor = weight.grad  # type: ignore[assignment]
            velocity.mul_(group["momentum"]).add_(gradient)
            directions.append(torch.add(gradient, velocity, alpha=group["momentum"]))  # Nesterov's look ahead
        fused = 3 if rows == 3 * columns else 1
        stack = torch.stack(directions).view(-1, rows // fused, columns)  # (matrices, rows, columns)
        updates = orthogonalize(stack).reshape(len(weights), rows, columns)
        size = 0.2 * max(rows // fused, columns) ** 0.5
        for weight, update in zip(weights, updates.unbind(), strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update, alpha=-group["lr"] * size)


def optimizers(model: nn.Module, how: Optimizer) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices of the blocks; AdamW for embeddings, projections, gains and biases. Only matrices decay."""
    matrices, others, gains = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim == 2 and ("resblocks" in name or "cross_attn" in name):
            matrices.append(parameter)
        elif parameter.ndim >= 2:
            others.append(parameter)
        else:
            gains.append(parameter)
    groups = [{"params": others, "weight_decay": how.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return Muon(matrices, lr=how.lr, weight_decay=how.weight_decay), torch.optim.AdamW(groups, lr=how.lr, betas=(0.9, 0.98))
