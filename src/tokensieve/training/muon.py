"""Muon: momentum with orthogonalised updates, so that all directions of a weight matrix learn equally fast.

After Jordan et al., 2024 ("Muon: an optimizer for hidden layers in neural networks"), with the scale of Liu et al., 2025
(arXiv:2502.16982): an update has the size an AdamW update would have, so both share one learning rate.
torch.optim.Muon orthogonalises in bfloat16, one matrix after the other, which on a CPU costs more than the
training step itself; here it is float32, and all matrices of a shape are updated together.
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


class TwoOptimizers:
    """Muon for the matrices of transformer blocks, AdamW for embeddings, projections, gains and biases; one learning rate.

    in_block: whether a parameter, by its name, belongs to a block. Gains and biases have no weight decay.
    """

    def __init__(self, model: nn.Module, settings: Optimizer, in_block: Callable[[str], bool]) -> None:
        self.clip = settings.clip
        matrices, others, gains = list[Tensor](), list[Tensor](), list[Tensor]()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                is_matrix = parameter.ndim == 2 and in_block(name)
                (gains if parameter.ndim < 2 else matrices if is_matrix else others).append(parameter)
        groups = [{"params": others, "weight_decay": settings.weight_decay}, {"params": gains, "weight_decay": 0.0}]
        self.muon = Muon(matrices, lr=settings.lr, weight_decay=settings.weight_decay)
        self.adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98))

    def start_step(self, rate: float) -> None:
        """Set the learning rate and clear the gradients."""
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Update the weights. Only AdamW's gradients are clipped: Muon's updates do not depend on their norm."""
        nn.utils.clip_grad_norm_([p for group in self.adamw.param_groups for p in group["params"]], self.clip)
        self.muon.step()
        self.adamw.step()

    def state(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
