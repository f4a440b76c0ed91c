"""Which tokens a decoder layer's tokens can attend to: those before them, those of a window, all those of one block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class LayerKind(NamedTuple):
    """What the layers have in common that share a mask and rotary tables."""

    name: str = "full_attention"  # of transformers' layer_types
    window: int | None = None  # a token sees itself and so many tokens before it, less one; None: all


@dataclass(frozen=True)
class Sight:
    """What each of T tokens can attend to in one layer.

    Tokens that a plan has dropped count for windows as if they were there, so `at` holds the indices in the whole sequence.
    """

    shape: tuple[int, int]  # B, T
    alive: Tensor | None = None  # (B, T), False is hidden; None: none is
    at: Tensor | None = None  # (B, T), indices in the sequence with all its tokens; None: 0 to T - 1
    block: Tensor | None = None  # (B, T), tokens of one block (a number from 0 on) see each other; None: there are no blocks
    window: int | None = None
    blocks_pass_window: bool = False  # tokens of a block see each other also where they are further apart than the window

    @property
    def is_causal(self) -> bool:
        """Whether each token sees all those before it, and nothing else counts."""
        return self.alive is None and self.block is None and self.window is None

    def of(self, index: Tensor) -> Tensor:
        """What the tokens at index (B or 1, Q) of the T see: (B or 1, Q, T)."""
        key = torch.arange(self.shape[1], device=index.device)[None] if self.at is None else self.at  # (B or 1, T)
        query = index if self.at is None else self.at.gather(1, index.expand(len(self.at), -1))  # (B or 1, Q)
        seen = key[:, None] <= query[..., None]
        near = None if self.window is None else key[:, None] > query[..., None] - self.window
        if near is not None and self.blocks_pass_window:
            seen = seen & near
        if self.block is not None:
            own = self.block.gather(1, index.expand(len(self.block), -1))[..., None]  # (B, Q, 1)
            seen = seen | ((own == self.block[:, None]) & (own >= 0))
        if near is not None and not self.blocks_pass_window:
            seen = seen & near
        return seen if self.alive is None else seen & self.alive[:, None]
