"""RoPE of a language model whose image tokens stand in a line, on a CPU.

vLLM gives such a model three rows of positions, of which its mRoPE takes the second (`positions.line_sections`). On a CPU that
is many small operations in every layer for every word. vLLM's kernel for plain RoPE, with that row, is one.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding, RotaryEmbedding


def use_kernel(model: Any) -> None:
    """Has the mRoPE of a model computed by the kernel, where vLLM computes on a CPU."""
    for module in model.modules():
        if isinstance(module, MRotaryEmbedding) and getattr(module._forward_method, "__name__", "") == "forward_cpu":
            module._forward_method = functools.partial(_rotate, module)


def _rotate(module: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
    """positions: (3, L), or (L,) where the three rows are equal."""
    return RotaryEmbedding.forward_cpu(module, positions if positions.dim() == 1 else positions[1], query, key)
