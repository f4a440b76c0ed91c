"""Operators of torch that its ONNX exporter does not know, written with those of ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18 as op


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The operators by their name in torch, for torch.onnx.export(custom_translation_table=...)."""
    aten = torch.ops.aten
    return {
        aten.sort.stable: _sort,
        aten._cdist_forward.default: _distances,
        aten.nanmedian.dim: _median,
    }


def _sort(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """ONNX's TopK prefers the lower index among equal values: of all values it is a stable sort."""
    return op.TopK(self, _size(self, dim), axis=dim, largest=int(descending), sorted=1)


def _distances(x1: Any, x2: Any, p: float, compute_mode: int | None) -> Any:
    """Euclidean distances by differences, (B, R, C), (B, N, C) -> (B, R, N)."""
    difference = op.Sub(op.Unsqueeze(x1, _constant(-2)), op.Unsqueeze(x2, _constant(-3)))
    return op.Sqrt(op.ReduceSumSquare(difference, _constant(-1), keepdims=0))


def _median(self: Any, dim: int, keepdim: bool = False) -> Any:
    """The lower of the two middle values; there is no NaN in a graph that is worth running."""
    n = self.shape[dim]
    values, indices = op.TopK(self, _constant((n + 1) // 2), axis=dim, largest=0, sorted=1)
    last = _constant(-1)
    values, indices = op.Gather(values, last, axis=dim), op.Gather(indices, last, axis=dim)
    return (values, indices) if keepdim else (op.Squeeze(values, _constant(dim)), op.Squeeze(indices, _constant(dim)))


def _size(x: Any, dim: int) -> Any:
    return op.Gather(op.Shape(x), _constant(dim), axis=0)


def _constant(value: int) -> Any:
    return op.Constant(value_ints=[value])
