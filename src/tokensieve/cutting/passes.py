"""The state of one forward pass, and the calls under way in each thread.

No state of a forward pass is stored on the handle or the model. Each call of the model opens a `Call` in its thread and closes
it at its end, so that calls in several threads, calls inside hooks and calls that raise do not mix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tokensieve.core import Reduction
from tokensieve.cutting.decoder_state import DecoderCall
from tokensieve.cutting.placement import Cut
from tokensieve.errors import UserError, describe_value
from tokensieve.models.image_grid import IMAGE, VIDEO, ImageTokens
from tokensieve.models.patching import replace
from tokensieve.models.tower import Entry, Layout, Undo
from tokensieve.scoring import Attention

if TYPE_CHECKING:
    from tokensieve.cutting.packed_tower import Squares

BETWEEN_TILES = 0x9E3779B1  # between the numbers of two tiles of an image, by which random choices differ
RESIZED = (IMAGE, VIDEO)  # layers of the ledger's rows about smaller images and videos


@dataclass(frozen=True)
class Row:
    """One line of the ledger: patch tokens in and out at one cut."""

    layer: str  # the position, "6"; or "image", "video": they were made smaller
    tokens_in: int
    tokens_out: int  # of the image that is left with most

    @classmethod
    def of(cls, layer: str, reduction: Reduction) -> Row:
        """The line of a reduction."""
        if reduction.counts is None or torch.compiler.is_compiling():
            return Row(layer, reduction.n, reduction.k)
        return UnevenRow.of_counts(layer, reduction.n, reduction.counts.tolist())


@dataclass(frozen=True)
class UnevenRow(Row):
    """A cut that left images with different numbers of tokens: `tokens_out` is the most, and what they are otherwise."""

    mean_out: float
    least_out: int

    @classmethod
    def of_counts(cls, layer: str, tokens_in: int, counts: Collection[int]) -> UnevenRow:
        """The line of images that are left with these numbers of tokens."""
        mean = sum(counts) / max(1, len(counts))
        return cls(layer, tokens_in, max(counts, default=0), mean, min(counts, default=0))


@dataclass(frozen=True)
class TiledRow(UnevenRow):
    """A cut of images that are made of tiles, to each of which the method was applied."""

    tiles: int  # of the image with most of them
    most_of_tile: int  # tokens of a tile behind the cut
    least_of_tile: int


class TileCounts(NamedTuple):
    """The tokens of each tile of an image, before and behind a cut."""

    before: list[int]
    after: list[int]


def row_of_images(layer: str, images: Sequence[TileCounts]) -> Row:
    """The line of the ledger about images that may differ in their number of tokens, and may be made of tiles."""
    ins, outs = [sum(image.before) for image in images], [sum(image.after) for image in images]
    row = UnevenRow.of_counts(layer, max(ins), outs)
    if any(len(image.after) > 1 for image in images):
        of_tiles = [k for image in images for k in image.after]
        return TiledRow(
            **vars(row),
            tiles=max(len(image.after) for image in images),
            most_of_tile=max(of_tiles),
            least_of_tile=min(of_tiles),
        )
    return Row(layer, ins[0], outs[0]) if len({*ins}) == len({*outs}) == 1 else row


@dataclass
class Pass:
    """What a plan has done so far to the images of one forward pass."""

    samples: Tensor  # (B,), the index of each image within the run
    grid: tuple[int, int] | None  # (h, w) of this batch; None: its images have different grids
    has_full_grid: bool  # all patches of the grid are there (no patch dropout)
    sizes: Tensor | None = None  # (B, N now)
    bias: Tensor | None = None  # (B, 1, 1, P + N now), log of the sizes
    attention: Attention | None = None  # of the current block, where it is needed
    attention_index: Tensor | None = None  # (B, N now), patches of the attention that are left; None: all
    patch_index: Tensor | None = None  # (B, N now), patches of block 1's input that are left; None: all
    ledger: list[Row] = field(default_factory=list)
    stages: list[tuple[str, Reduction]] = field(default_factory=list)  # every cut that removed tokens
    # of a cut in the decoder, by its seed: its place in the ledger, and the tokens in and out of each image by its number
    decoder_cuts: dict[int, tuple[int, dict[int, tuple[int, int]]]] = field(default_factory=dict)
    # of a cut behind the projector, by its seed: its place in the ledger, and the tokens of each image or video
    projected_cuts: dict[int, tuple[int, list[TileCounts]]] = field(default_factory=dict)
    layouts: list[ImageTokens] = field(default_factory=list)  # of each image or video; empty: as in the tower
    is_uneven: bool = False  # images had different numbers of tokens in the decoder
    soft: list[tuple[str, Reduction]] = field(default_factory=list)  # every cut with a soft mask instead of a choice
    n_replaced: int = 0  # replaced methods of blocks and head that have run
    first: int = 0  # patches of an image before any cut
    counts: Tensor | None = None  # (B,), tokens of each image that are left, where they differ; the others are padding
    before: Tensor | None = None  # (B, P+N, D), the tokens before the MLP of the current block, where they are needed
    # by block: its attention, and which of its patches are left, (B, N now); None: all. For methods that see earlier blocks
    earlier: dict[int, tuple[Attention, Tensor | None]] = field(default_factory=dict)
    carried: dict[str, Tensor] = field(default_factory=dict)  # by step: (B, N now), what its method carries from cut to cut

    def current_attention(self) -> Attention | None:
        """The attention among the tokens that are left."""
        if self.attention is None or self.attention_index is None:
            return self.attention
        return self.attention.select(self.attention_index)

    def earlier_attention(self) -> dict[int, Attention]:
        """The recorded attention of earlier blocks among the tokens that are left."""
        return {
            number: attention if index is None else attention.select(index)
            for number, (attention, index) in self.earlier.items()
        }

    def follow(self, step: str, reduction: Reduction) -> None:
        """Has what is kept about single tokens follow a cut."""
        if reduction.carry is not None:
            self.carried[step] = reduction.carry
        self.carried = {name: values.gather(1, reduction.index) for name, values in self.carried.items()}
        self.attention_index = compose(self.attention_index, reduction.index)
        self.patch_index = compose(self.patch_index, reduction.index)
        self.earlier = {
            number: (attention, compose(index, reduction.index)) for number, (attention, index) in self.earlier.items()
        }
        if reduction.counts is not None:
            self.counts = reduction.counts

    def record_decoder_cut(self, cut: Cut, reduction: Reduction, numbers: list[int]) -> None:
        """Adds a cut in the decoder for the images with these numbers to the ledger. Beams repeat images.

        Images that differ in their number of tokens come in groups, and share a line of the ledger; `stages` has the first
        group. A cut is recorded once, also if generation without a cache repeats it.
        """
        first_rows = [numbers.index(number) for number in dict.fromkeys(numbers)]
        self.is_uneven |= len(first_rows) < len(self.samples) or reduction.counts is not None
        is_first = cut.seed not in self.decoder_cuts
        at, images = self.decoder_cuts.setdefault(cut.seed, (len(self.ledger), {}))
        if all(number in images for number in numbers):
            return
        row = Row(cut.name, reduction.n, reduction.n) if reduction.soft is not None else Row.of(cut.name, reduction)
        left = [row.tokens_out] * len(numbers) if reduction.counts is None else reduction.counts.tolist()
        images.update({numbers[first]: (reduction.n, left[first]) for first in first_rows})
        if not is_first:
            counts = [tokens_out for _, tokens_out in images.values()]
            row = UnevenRow.of_counts(cut.name, max(tokens_in for tokens_in, _ in images.values()), counts)
        self.ledger[at : at + 1] = [row]
        if not is_first:
            return
        if reduction.soft is not None:
            self.soft.append((cut.name, reduction))
        elif reduction.k < reduction.n:
            if len(first_rows) < len(numbers):
                reduction = reduction.select_images(torch.tensor(first_rows, device=reduction.index.device))
            self.stages.append((cut.name, reduction))


def compose(index: Tensor | None, chosen: Tensor) -> Tensor:
    """Selects chosen (B, K) from the indices (B, N) of what is left: (B, K). None: everything is left."""
    return chosen if index is None else index.gather(1, chosen)


@dataclass
class Call:
    """One call of the model, from its start to its end."""

    decoder: DecoderCall  # of a vision-language model
    samples: Tensor | None = None  # (B,), indices of the samples, if the caller sets them
    context: Mapping[str, Any] = field(default_factory=dict)  # view.context of the methods
    layout: Layout | None = None  # of the batch
    full_grid: tuple[int, int] | None = None  # of the first image before the plan made it smaller; None: as configured
    tower: Pass | None = None  # None: the first block has not run
    squares: Squares | None = None  # while a tower with cuts runs whose batch is one sequence of patches
    features_pass: Pass | None = None  # the pass that computed the image features of `decoder`
    entered: set[tuple[int, str]] = field(default_factory=set)  # entries of this call that have started
    running: set[tuple[int, str]] = field(default_factory=set)  # those that have not returned


@dataclass(frozen=True)
class CallOptions:
    """The options that `handle.call(...)` sets for the calls inside its `with` block."""

    samples: Tensor | None
    context: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        if self.samples is not None:
            check_integers("samples", "(B,), one for each sample of the batch", self.samples, dim=1)
        if self.context is not None and not isinstance(self.context, Mapping):
            raise UserError(f"context is a mapping of names to values, not {describe_value(self.context)}")


def check_integers(name: str, shape: str, value: Any, dim: int) -> None:
    """Raises a UserError unless the value is a tensor of whole numbers with so many dimensions. shape: for the message."""
    wanted = f"{name} are a tensor of whole numbers of shape {shape}"
    if not isinstance(value, Tensor):
        raise UserError(f"{wanted}, not {describe_value(value)}")
    is_whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if not is_whole or value.dim() != dim:
        raise UserError(f"{wanted}, not {value.dtype} of shape {tuple(value.shape)}")


def check_sample_count(samples: Tensor, n: int) -> None:
    """Raises a UserError unless the samples that the caller set are as many as the batch has."""
    if len(samples) != n:
        raise UserError(
            f"handle.call(samples=...) has {len(samples)} indices, but the batch has {n} samples; give one for each"
        )


class _ThreadState:
    """The calls of one thread."""

    def __init__(self) -> None:
        self.current: Call | None = None  # the innermost call under way
        self.last: Call | None = None  # the last call that ended; None if it failed
        self.has_ended = True  # a call has ended since the current one began
        self.n_samples = 0  # samples so far; random choices depend on their index, not on batches


class _Threads(threading.local):
    """A state for each thread. (torch.compile tracks changes of an object in a thread-local, not of the thread-local.)"""

    def __init__(self) -> None:
        self.state = _ThreadState()


class Calls:
    """The calls of a model with a plan, in all threads."""

    def __init__(self, context: Mapping[str, Any]) -> None:
        self._context = context
        self._threads = _Threads()
        self._options: ContextVar[CallOptions | None] = ContextVar("tokensieve call options", default=None)

    @contextmanager
    def options(self, options: CallOptions) -> Iterator[None]:
        """Sets the options of the calls inside the `with` block, in this thread or task."""
        token = self._options.set(options)
        try:
            yield
        finally:
            self._options.reset(token)

    @property
    def current(self) -> Call:
        """The call under way. If blocks run without their model, the last call, or a new one that stays open."""
        state = self._threads.state
        if state.current is not None:
            return state.current
        if state.last is None:
            state.last = self.new_call()
        return state.last

    @property
    def latest(self) -> Call | None:
        """The call under way in this thread, or its last one; None if there is none or it failed."""
        state = self._threads.state
        return state.current or state.last

    @property
    def recorded(self) -> Call | None:
        """The last call of this thread that ended, None if it failed; the call under way if none has ended since it began."""
        state = self._threads.state
        return state.last if state.has_ended else state.current

    @property
    def is_open(self) -> bool:
        """Whether a call is under way in this thread."""
        return self._threads.state.current is not None

    def new_call(self, context: Mapping[str, Any] | None = None) -> Call:
        """A call with the options of this thread. context: entries that the model adds."""
        options = self._options.get()
        samples = None if options is None else options.samples
        users = self._context if options is None or options.context is None else {**self._context, **options.context}
        return Call(DecoderCall(), samples=samples, context={**context, **users} if context else users)

    def run(self, call: Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function as this call: it is the current call until the function returns, and then the last one.

        If the function fails, there is no last call, whatever calls inside it have ended.
        """
        state = self._threads.state
        outer, ended = state.current, None
        try:
            state.last, state.current, state.has_ended = None, call, False
            out = function(*args, **kwargs)
            ended = call
        finally:
            state.last, state.current, state.has_ended = ended, outer, True
        return out

    def patch(self, entry: Entry, check: Callable[[Call], None]) -> Undo:
        """Replaces a method of the model, so that it opens a call or joins the one under way (see `Entry`).

        check: called at the end of an entry that runs all blocks.
        """
        key, body = (id(entry.owner), entry.method), (id(entry.owner), entry.follows)

        def planned(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            state = self._threads.state
            call = state.current
            joins = entry.kind != "call" and call is not None and key not in call.entered and body not in call.running
            if not joins:
                call = state.last if entry.kind == "head" else None
            if call is None:
                try:
                    call = self.new_call(None if entry.context is None else entry.context(*args, **kwargs))
                except BaseException:
                    state.last = None  # the call has failed
                    raise
            call.entered.add(key)
            call.running.add(key)

            def run() -> Any:
                out = stock(*args, **kwargs)
                if entry.runs_all:
                    check(call)
                return out

            try:
                return run() if joins else self.run(call, run)
            finally:
                call.running.discard(key)

        return replace(entry.owner, entry.method, planned)

    def number_samples(self, n: int, device: torch.device) -> Tensor:
        """The indices of the next n samples of this thread, (n,).

        In a compiled or exported graph they start at 0 in every batch, because a counter would become a constant of the graph.
        """
        if torch.compiler.is_compiling():
            return torch.arange(n, device=device)
        state = self._threads.state
        first, state.n_samples = state.n_samples, state.n_samples + n
        return torch.arange(first, state.n_samples, device=device)

    def forget(self) -> None:
        """Resets this thread: no last call, and the next sample has index 0."""
        self._threads.state = _ThreadState()
