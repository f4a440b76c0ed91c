"""What opening a model gives: a Tower of blocks that a plan can cut. Each family has a module that makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn

from tokensieve.models.patching import Patch
from tokensieve.models.resizing import Resizing
from tokensieve.scoring import Attention, gather_tokens

if TYPE_CHECKING:
    from tokensieve.core import View


Sizes = Callable[[], Tensor | None]  # the (B, N) sizes of the pass under way, or None
Undo = Callable[[], None]
BlockInputs = tuple[tuple[Any, ...], Mapping[str, Any]]  # what a model hands its blocks besides the tokens


class Block(Protocol):
    """One transformer block in two halves, so that a cut can stand between them."""

    module: nn.Module  # the stock block; its own forward runs wherever nothing has to be opened

    @property
    def attention(self) -> nn.Module:
        """The block's attention, whose work `attend` does."""
        ...

    def select_inputs(self, index: Tensor | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockInputs:
        """What the model hands this block besides x, for the patches index (B, K) of those it was made for (None: all).

        A UserError if it is something that cannot follow a cut.
        """
        ...

    def attend(self, x: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> tuple[Tensor, Attention]:
        """x (B, P+N, D) plus the attention branch; bias (B, 1, 1, P+N) is added to the logits of each key.

        args and kwargs: what select_inputs() gave. Forward hooks of the attention run as in the stock block.
        """
        ...

    def mlp(self, x: Tensor) -> Tensor:
        """x plus the MLP branch."""
        ...


@dataclass(frozen=True)
class Entry:
    """A method of the model by which a forward pass comes in.

    call: a whole call, which stands for itself also inside of another one (a model called in a hook).
    part: a part of the call under way, once in it; a call of its own where there is none, or where it ran already.
    head: like part, but on its own it goes on with the call that ended last (`forward_head` after `forward_features`).
        While the method that it follows is running, it belongs to a call inside a hook, not to the one under way.
    """

    owner: Any
    method: str
    kind: Literal["call", "part", "head"] = "call"
    context: Callable[..., Mapping[str, Any]] | None = None  # of the method's arguments: what methods see as view.context
    follows: str = ""  # of a head: the method whose output it gets
    runs_all: bool = False  # it runs every block of the tower, and its head if there is one


@dataclass(frozen=True)
class Layout:
    """How the patches of the current batch are arranged."""

    grid: tuple[int, int]  # (h, w) of every image; where they differ, of the first
    n: int  # patches of each image; where they differ, of the first
    no_cut_reason: str = ""  # why tokens of this batch cannot be cut: its images have different grids
    images: Tensor | None = None  # (B, C, H, W), what the patches are made of, where it is known


@dataclass
class Tower:
    """A vision transformer, opened."""

    family: str
    blocks: list[Block]
    prefix: int  # tokens before the patches (CLS, registers, distillation), never cut
    has_cls: bool  # the first prefix token is CLS
    grid: tuple[int, int]  # (h, w) of the patches of an image of the configured size
    image_size: tuple[int, int]  # (h, w) in pixels, as configured
    pools_cls: bool  # the image feature is made of prefix tokens alone
    check: Callable[[], None]  # raises UserError where the model is in a state in which it cannot be cut
    on_layout: Callable[[Callable[[Layout], None]], list[Undo]]  # calls back with each batch's layout before its first block
    patch_pooling: Callable[[Sizes], list[Undo]]  # makes the model's own pooling respect sizes; undone by the list
    entries: list[Entry]  # by which forward passes come in, outer ones first
    project: Callable[[Tensor], Tensor]  # (B, N, D) -> (B, N, E): the image feature that each token alone would give
    pooling: Callable[[View], Tensor] | None = None  # (B, N), attention of the pooling query, where there is one
    per_token: bool = False  # its blocks are handed something for each token (rotary angles), which has to follow the cuts
    head: nn.Module | None = None  # what sees the global feature and the projected tokens (B, 1+N, E); then @out is there
    head_width: int = 0  # E
    no_blocks_reason: str = ""  # why there are no blocks, where only @out can be cut
    signed_layers: Sequence[nn.Module] | None = None  # by which trained parts recognise the model; None: its blocks
    own_parts: Mapping[str, nn.Module] = field(default_factory=dict)  # trained parts of methods that the model itself holds
    pads: bool = False  # images have any size; a batch holds padding behind their patches, hidden by a mask
    full_depth: int = 0  # all blocks, where the model does not run the last ones; 0: it runs them all
    resize: Callable[[Resizing], list[Undo]] | None = None  # has the tower see images of another size
    no_resize_reason: str = ""  # why it cannot
    # numbers of samples, and the call's context -> numbers of the rows of its batch
    expand_sample_ids: Callable[[Tensor, Mapping[str, Any]], Tensor] = lambda samples, context: samples

    @property
    def depth(self) -> int:
        return len(self.blocks)


def watch_conv(conv: nn.Module, set_layout: Callable[[Layout], None]) -> list[Undo]:
    """The layout of a batch as the convolution that makes its patches lays them out: (B, D, h, w)."""

    def record(module: nn.Module, args: Any, out: Tensor) -> None:
        h, w = out.shape[-2:]
        set_layout(Layout((h, w), h * w, images=args[0] if args else None))

    return [conv.register_forward_hook(Patch(record)).remove]


def gather_rotary(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table of rotary angles for the patches of each image.

    table: (N, d), (H, N, d) or (B, H or 1, N, d); index: (B, K) -> (B, H or 1, K, d)
    """
    table = table.reshape((1,) * (4 - table.dim()) + table.shape)
    return gather_tokens(table.expand(index.shape[0], -1, -1, -1), index)
