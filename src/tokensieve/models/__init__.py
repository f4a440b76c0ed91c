"""How a model is opened: one file a family, each turning a stock model into a Tower that a plan can cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from tokensieve.errors import Uncuttable
from tokensieve.scoring import Attention

if TYPE_CHECKING:
    from tokensieve.core import View

Sizes = Callable[[], Tensor | None]  # the (B, N) sizes of the pass under way, or None
Undo = Callable[[], None]


class Block(Protocol):
    """One transformer block in two halves, so that a cut can stand between them."""

    module: nn.Module  # the stock block; its own forward runs wherever nothing has to be opened

    def look(self, x: Tensor, bias: Tensor | None = None) -> Attention:
        """The block's attention on its input x (B, P+N, D), without running it."""
        ...

    def attend(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Attention]:
        """x plus the attention branch; bias (B, 1, 1, P+N) is added to the logits of each key."""
        ...

    def feed(self, x: Tensor) -> Tensor:
        """x plus the MLP branch."""
        ...


@dataclass
class Tower:
    """A vision transformer, opened."""

    family: str
    blocks: list[Block]
    prefix: int  # tokens before the patches, never cut
    has_cls: bool  # the first prefix token is CLS
    grid: tuple[int, int]  # (h, w) of the patches of an image of the configured size
    image_size: tuple[int, int]  # (h, w) in pixels, as configured
    pools_cls: bool  # the image feature is made of CLS alone
    check: Callable[[], None]  # raises UserError where the model is in a state in which it cannot be cut
    weigh_pooling: Callable[[Sizes], list[Undo]]  # makes the model's own pooling respect sizes; undone by the list
    project: Callable[[Tensor], Tensor]  # (B, N, D) -> (B, N, E): the image feature that each token alone would give
    pooling: Callable[[View], Tensor] | None = None  # (B, N), attention of the pooling query, where there is one

    @property
    def depth(self) -> int:
        return len(self.blocks)


def open_tower(model: nn.Module) -> Tower:
    """The vision tower of a model of any known family; Uncuttable, with the reason, where there is none."""
    from tokensieve.models import open_clip

    for family in (open_clip,):
        tower = family.open_tower(model)
        if tower is not None:
            return tower
    raise Uncuttable(
        f"{type(model).__name__} is of no family that can be cut; known: open_clip models with a VisionTransformer tower"
    )
