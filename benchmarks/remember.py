"""Blocks that remember their last outputs, so that plans that are compared share the work before their first cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def remember_outputs(blocks: Sequence[nn.Module], inputs: int = 1) -> None:
    """Has every block return its last output again while its input is the same.

    A batch that is encoded under one plan after another then runs through the blocks before a cut once. (Not through a
    block whose attention a method needs: a plan opens it, and it refuses blocks whose `forward` was set, so each block gets a
    class of its own.) inputs: how many a block remembers; a model that encodes several images of a sample one after the other
    needs as many.
    """
    for block in blocks:
        kind = type(block)
        again = _remembering(kind.forward, inputs)
        block.__class__ = type(kind.__name__, (kind,), {"forward": again, "__module__": kind.__module__})  # for this one alone


def _remembering(forward: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    last: deque[tuple[Tensor, Any]] = deque(maxlen=inputs)

    def again(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for known, output in last:
            if x is known or (x.shape == known.shape and torch.equal(x, known)):
                return output
        output = forward(self, x, *args, **kwargs)
        last.append((x, output))
        return output

    return again
