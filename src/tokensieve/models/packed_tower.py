"""The vision tower of a Qwen-VL, opened: patches of all images in one sequence, and squares of them that become one token.

A square is a few patches in a row of the sequence, and the mergers behind the blocks look at one square at a time. Attention is
within an image (of a video, a frame), or within a window of it; where each begins is handed to the blocks with the tokens. So
whole squares can be missing from the sequence, if what belongs to them is missing too (`select_inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import UserError
from tokensieve.models.patching import replace
from tokensieve.models.tower import Undo

ENDS = "cu_seqlens"  # argument of a block: where each image or window begins, (I+1,)
LONGEST = "max_seqlen"  # argument of a block: patches of the longest of them; None: nobody asks


@dataclass(frozen=True)
class PackedTower:
    """A tower whose batch is one sequence of patches."""

    visual: Any

    @property
    def blocks(self) -> list[nn.Module]:
        """In the order in which they run."""
        return list(self.visual.blocks)

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len(self.visual.blocks)

    @property
    def mergers(self) -> list[nn.Module]:
        """What makes tokens of squares: behind the last block, and (Qwen3-VL) behind earlier ones."""
        return [self.visual.merger, *getattr(self.visual, "deepstack_merger_list", ())]

    @property
    def first_read(self) -> int:
        """The first block behind which a merger reads the patches."""
        return 1 + min((*getattr(self.visual, "deepstack_visual_indexes", ()), self.depth - 1))

    @property
    def unit(self) -> int:
        """Patches of a square."""
        return int(self.visual.spatial_merge_size) ** 2

    def check(self) -> None:
        """Raises a UserError where the tower is in a state in which it cannot be cut."""
        if any(block.training and getattr(block, "gradient_checkpointing", False) for block in self.blocks):
            raise UserError(
                "gradient checkpointing runs blocks twice, so tokens would be cut twice; "
                "call model.gradient_checkpointing_disable() first"
            )

    def watch_order(self, record: Callable[[Tensor], None]) -> list[Undo]:
        """Calls back before the first block with the order of the squares in the sequence, (S,), by their raster numbers.

        Only a tower with windows (Qwen2.5-VL) has an order of its own: window by window.
        """
        name = "permute_input_for_window_attn"
        if not hasattr(self.visual, name):
            return []

        def permute(stock: Callable[..., Tensor], x: Tensor, window_index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            record(window_index)
            return stock(x, window_index, *args, **kwargs)

        return [replace(self.visual, name, permute)]


def open_packed(inner: Any) -> PackedTower:
    """The tower of a Qwen-VL."""
    return PackedTower(inner.visual)


def select_inputs(at: Tensor, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a block is handed besides the tokens, for the patches at these places of the sequence alone.

    at: (P,), ascending. Images and windows of which nothing is left are left out.
    """
    ends, tables = inputs[ENDS], inputs["position_embeddings"]
    at = at.to(ends.device)
    left = torch.searchsorted(at, ends.to(at.dtype)).unique_consecutive().to(ends.dtype)
    short = {ENDS: left, "position_embeddings": tuple(table[at] for table in tables)}
    if inputs.get(LONGEST) is not None:
        short[LONGEST] = int(left.diff().max())
    return {**inputs, **short}
