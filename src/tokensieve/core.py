"""The types of a method: its input (View) and its output (Reduction, or Resize for methods that act on the image)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.errors import UserError
from tokensieve.scoring import Attention, noise

MAX_NORM_RATIO = 4.0  # of the mean norm of merged tokens to the norm of their mean: beyond it norms are not restored in full


@dataclass(frozen=True)
class Resize:
    """The output of a method that acts on the image: the size at which the tower sees it, and how it gets there."""

    size: tuple[int, int]  # (h, w) in pixels
    antialias: bool = False  # bicubic interpolation with a filter against aliasing, or without


@dataclass
class Question:
    """The text that came with each image."""

    tokens: Tensor  # (B, T, E), input embeddings or hidden states of the language model at this position
    mask: Tensor  # (B, T), False: padding

    def rows(self, index: Tensor) -> Question:
        """The questions of these images."""
        return Question(self.tokens[index], self.mask[index])


@dataclass
class Inputs:
    """What the language model was given: its input embeddings, before its first layer."""

    tokens: Tensor  # (B, N0, D), the vision tokens
    question: Question


@dataclass
class Rotary:
    """The rotary embedding of a language model: the tables (cos, sin) that turn the queries and keys of each token."""

    tokens: tuple[Tensor, Tensor]  # (B, N, d) each, the vision tokens
    question: tuple[Tensor, Tensor]  # (B, T, d) each, in the order of View.question


@dataclass
class View:
    """The input of a method: the patch tokens at one cut and what is known about them.

    Prefix tokens (CLS, registers) are not among `tokens`. B images, N tokens each, width D. Do not modify its tensors.

    Example:
        >>> def largest(view: View, keep: int) -> Reduction:
        ...     scores = view.tokens.float().norm(dim=-1)  # (B, N)
        ...     return Reduction.keep(scores.topk(keep).indices, view.n, scores=scores)
    """

    tokens: Tensor  # (B, N, D), the tokens that arrive at the cut, in raster order
    prefix: Tensor  # (B, P, D), CLS and registers
    grid: tuple[int, ...] | None  # (h, w), of a video (frames, h, w), while no patch is missing, else None
    attention: Attention | None = None  # of the block before the cut, for methods with needs=("attention",)
    sizes: Tensor | None = None  # (B, N), the number of patches merged into each token; None: one each
    samples: Tensor | None = None  # (B,), the number of each image within the run
    seed: int = 0
    context: Mapping[str, Any] = field(default_factory=dict)  # more inputs by name, from apply(..., context=...)
    part: Any = None  # the method's trained module, if it has one
    pooling: Callable[[View], Tensor] | None = None  # (B, N), attention of the pooling query, if the tower has one
    place: str = ""  # the position of the cut: "6", "6.attn", "out", "llm.10"
    question: Question | None = None  # the text, in a vision-language model
    has_cls: bool = True  # the first prefix token, if there is any, is CLS (or, after the tower, the global feature)
    layer: int = 0  # the number of the block before or around the cut, from 1; in a decoder: of the layer behind it, from 0
    depth: int = 0  # the number of blocks of the tower, or of layers of the decoder
    full_depth: int = 0  # of a tower with blocks that the model does not run (a LLaVA takes an earlier layer): of all; 0: depth
    earlier: Mapping[int, Attention] = field(default_factory=dict)  # of the blocks that the method declares, by number from 1
    before: Tensor | None = None  # (B, N, D), the tokens before the block's MLP, for needs=("before",)
    pixels: Tensor | None = None  # (B, N, C p p), the pixels of the patches, for needs=("pixels",)
    text: Tensor | None = None  # (B, M, E), embeddings of the text by the model's text tower, for needs=("text",)
    image_embeds: Tensor | None = None  # (B, N, E), the tokens in the space of `text`
    inputs: Inputs | None = None  # the decoder's own input, for needs=("inputs",)
    rotary: Rotary | None = None  # of the decoder, for needs=("rotary",)
    carried: Tensor | None = None  # (B, N), what the step's method gave as Reduction.carry at its cut before this one
    final_norm: Callable[[Tensor], Tensor] | None = None  # the norm behind the last layer of the decoder
    present: Tensor | None = None  # (B, N), the probability that each token is there, behind a soft cut; None: all are
    frames: Tensor | None = None  # (B, N), of a video: the frame that each token is of, from 0; None: an image
    share: Fraction | None = None  # of the tokens that are to stay, where the plan states a share; None: a number of tokens

    @property
    def n(self) -> int:
        """The number of tokens, N."""
        return self.tokens.shape[1]

    def video_grid(self) -> tuple[int, int, int]:
        """The grid as (frames, h, w). An image is a video of one frame; where tokens are missing, they are one row of it."""
        if self.grid is None:
            return 1, 1, self.n
        frames = self.grid[0] if len(self.grid) == 3 else 1
        return frames, self.grid[-2], self.grid[-1]

    def noise(self) -> Tensor:
        """Uniform random numbers, (B, N). They depend on the seed and the image, not on the batch."""
        samples = self.samples
        if samples is None:
            samples = torch.arange(self.tokens.shape[0], device=self.tokens.device)
        return noise(samples, self.n, self.seed)

    def global_token(self) -> Tensor:
        """One token for the whole image, (B, D): the CLS token, or without one the mean token."""
        return self.prefix[:, 0] if self.has_cls and self.prefix.shape[1] else self.tokens.mean(1)

    def coarse(self) -> Tensor:
        """A_coarse, (B, N): the attention that each patch gets from the token that becomes the image feature.

        The CLS row of the block's attention. Without a CLS token, the attention of the pooling query. Without both, the mean
        attention that a patch receives.
        """
        if self.attention is not None and self.attention.has_cls and self.attention.prefix:
            return self.attention.cls_row()
        if self.pooling is not None:
            return self.pooling(self)
        if self.attention is None:
            raise UserError('A_coarse needs the attention of a block: register the method with needs=("attention",)')
        return self.attention.received()

    def sizes_or_ones(self) -> Tensor:
        """The sizes, (B, N) float32; ones where nothing has been merged."""
        if self.sizes is not None:
            return self.sizes
        return torch.ones(self.tokens.shape[:2], device=self.tokens.device)

    def summary(self) -> Tensor:
        """Deprecated name of `global_token`."""
        _warn_renamed("View.summary", "View.global_token")
        return self.global_token()

    def size(self) -> Tensor:
        """Deprecated name of `sizes_or_ones`."""
        _warn_renamed("View.size", "View.sizes_or_ones")
        return self.sizes_or_ones()


def frame_numbers(grid: tuple[int, ...], batch: int, device: torch.device) -> Tensor | None:
    """The frame of each token of videos with this grid, (B, N); None for images."""
    if len(grid) < 3:
        return None
    frames, h, w = grid
    return torch.arange(frames, device=device).repeat_interleave(h * w).expand(batch, -1)


@dataclass
class Reduction:
    """The output of a method: K tokens made of N, in one of three forms. `apply` reduces any tensor (B, N, ...) the same way.

    A selection (`Reduction.keep`) is a gather of `index`. A merge (`Reduction.merge`) adds up the members of each group: every
    token belongs to one output token, `assigned`, with its share of the mean, `shares`. A mixture, in which a token may go into
    several outputs, is a matrix product with `weight`. In all forms `index` has the input token that represents each output
    token, which pictures show.

    Example:
        >>> reduction = Reduction.keep(scores.topk(keep).indices, view.n, scores=scores)
        >>> reduction.apply(view.tokens).shape
        torch.Size([8, 60, 768])
    """

    index: Tensor  # (B, K), ascending for a selection
    n: int  # the number of input tokens, N
    weight: Tensor | None = None  # (B, K, N), of a mixture
    sizes: Tensor | None = None  # (B, K), number of patches merged into each output token; None: that of its index
    scores: Tensor | None = None  # (B, N), what the tokens were ranked by
    gate: Tensor | None = None  # (B, K), 1 forward, the gradient of the scores backward: straight-through training. Between
    # each output token and `stand_in`; without that, a factor
    anchors: Tensor | None = None  # (B, A), input tokens that pictures mark
    soft: Tensor | None = None  # (B, N), probabilities of keeping: nothing is dropped, later attention adds their logarithms;
    # `index` has the tokens that the hard form of the choice would keep
    norm: float = 0.0  # the power with which `apply` restores the norms that averaging shortens; 0: it does not
    assigned: Tensor | None = None  # (B, N), of a merge: the output token of each input token; -1: it is dropped
    shares: Tensor | None = None  # (B, N), of a merge: the weight of each input token in its output token; 0: it is dropped
    stand_in: Tensor | None = None  # (B, K), the output token that would replace each output token if it were not chosen
    counts: Tensor | None = None  # (B,), output tokens of each image, where they differ; the others are padding of size 0
    carry: Tensor | None = None  # (B, N), numbers that the method wants to see at its next cut, of the tokens left there
    prop_attn: bool = True  # later attention adds log(sizes)
    finish: Callable[[Tensor], Tensor] | None = None  # what output tokens (B, K, D) go through after they are mixed

    @classmethod
    def keep(
        cls,
        index: Tensor,
        n: int,
        scores: Tensor | None = None,
        gate: Tensor | None = None,
        anchors: Tensor | None = None,
    ) -> Reduction:
        """A selection: the tokens at `index` are kept unchanged, in raster order.

        Args:
            index: (B, K), in any order.
            n: the number of input tokens, `view.n`.
            scores: (B, N), what they were ranked by; `rest=fuse` weights by them, and pictures show them.
            gate: (B, K), for straight-through training.
            anchors: (B, A), tokens that pictures mark.
        """
        index, order = index.sort(dim=-1)
        return cls(index, n, scores=scores, gate=None if gate is None else gate.gather(1, order), anchors=anchors)

    @classmethod
    def merge(cls, groups: Tensor, index: Tensor, sizes: Tensor, scores: Tensor | None = None) -> Reduction:
        """A merge: each group of tokens becomes its size-weighted mean.

        Args:
            groups: (B, N), the output token of each input token; -1: it is dropped.
            index: (B, K), the input token that represents each group.
            sizes: (B, N), the sizes of the input tokens, `view.sizes_or_ones()`.
            scores: (B, N), what the tokens were ranked by.
        """
        to = groups.clamp_min(0)
        joined = sizes * (groups >= 0)  # (B, N)
        mass = sizes.new_zeros(index.shape).scatter_add(1, to, joined)  # (B, K)
        return cls(index, groups.shape[1], sizes=mass, scores=scores, assigned=groups, shares=joined / mass.gather(1, to))

    @classmethod
    def keep_some(cls, chosen: Tensor, sizes: Tensor | None = None, scores: Tensor | None = None) -> Reduction:
        """A selection of a different number of tokens for each image.

        Images with fewer tokens than others are padded. Padding has the size 0, so that no token attends to it.

        Args:
            chosen: (B, N), True for the tokens that are kept, at least one of each image.
            sizes: (B, N), the sizes of the tokens, `view.sizes`.
            scores: (B, N), what they were ranked by.
        """
        counts = chosen.sum(1)
        most = int(counts.amax()) if len(counts) else 0
        index = (~chosen).int().argsort(dim=1, stable=True)[:, :most]  # the chosen ones in raster order, then padding
        real = (torch.arange(most, device=chosen.device) < counts[:, None]).float()
        return cls(
            index, chosen.shape[1], scores=scores, counts=counts, sizes=real if sizes is None else real * sizes.gather(1, index)
        )

    @classmethod
    def stack(cls, images: Sequence[Reduction]) -> Reduction:
        """The reductions of single images, (1, K) each, as one of a batch; those with fewer tokens, in or out, are padded."""
        images = [each._without_padding() for each in images]
        most, n = max(each.k for each in images), max(each.n for each in images)
        counts = torch.tensor([each.k for each in images], device=images[0].index.device)

        def outputs(values: Tensor) -> Tensor:
            return F.pad(values, (0, most - values.shape[1]))  # (1, K)

        def inputs(values: Tensor, value: int = 0) -> Tensor:
            return F.pad(values, (0, n - values.shape[1]), value=value)  # (1, N)

        def known(of_images: Sequence[Tensor | None]) -> Tensor | None:
            there = [inputs(each) for each in of_images if each is not None]
            return torch.cat(there) if len(there) == len(of_images) else None

        sizes = [torch.ones(each.index.shape, device=counts.device) if each.sizes is None else each.sizes for each in images]
        both = cls(
            index=torch.cat([outputs(each.index) for each in images]),
            n=n,
            sizes=torch.cat([outputs(size) for size in sizes]),
            scores=known([each.scores for each in images]),
            counts=counts,
            norm=images[0].norm,
            carry=known([each.carry for each in images]),
            prop_attn=images[0].prop_attn,
            finish=images[0].finish,
        )
        if all(each.is_selection for each in images):
            return both
        if any(each.weight is not None or each.gate is not None for each in images):
            weights = [each.as_weight() for each in images]  # (1, K, N) each
            return replace(both, weight=torch.cat([F.pad(w, (0, n - w.shape[2], 0, most - w.shape[1])) for w in weights]))
        members = [each._members() for each in images]
        assigned, shares = [inputs(to, -1) for to, _ in members], [inputs(share) for _, share in members]
        return replace(both, assigned=torch.cat(assigned), shares=torch.cat(shares))

    def _without_padding(self) -> Reduction:
        """Of one image: the same without the output tokens that are padding."""
        if self.counts is None:
            return self
        k = int(self.counts)
        of_outputs = {name: getattr(self, name) for name in ("index", "weight", "sizes", "gate", "stand_in")}
        trimmed: dict[str, Any] = {name: values[:, :k] for name, values in of_outputs.items() if values is not None}
        return replace(self, counts=None, **trimmed)

    def is_real(self) -> Tensor:
        """Which output tokens are no padding, (B, K)."""
        at = torch.arange(self.k, device=self.index.device).expand_as(self.index)
        return torch.ones_like(at, dtype=torch.bool) if self.counts is None else at < self.counts[:, None]

    @property
    def k(self) -> int:
        """The number of output tokens, K."""
        return self.index.shape[1]

    @property
    def is_selection(self) -> bool:
        """Whether output tokens are input tokens, unchanged."""
        return self.weight is None and self.assigned is None and self.gate is None

    @property
    def groups(self) -> Tensor:
        """The output token of each input token, (B, N), of several the one with most of it; -1 where it was dropped."""
        if self.assigned is not None:
            return self.assigned
        if self.weight is not None:
            share, output = (self.weight if self.sizes is None else self.weight * self.sizes[..., None]).max(dim=1)
            return output.masked_fill(share <= 0, -1)
        outputs = torch.arange(self.k, device=self.index.device).expand_as(self.index)
        none = self.index.new_full((self.index.shape[0], self.n), -1)
        if self.counts is None:
            return none.scatter_(1, self.index, outputs)
        outputs = torch.where(self.is_real(), outputs, -1)
        return none.scatter_reduce(1, self.index, outputs, "amax")

    def select_images(self, index: Tensor) -> Reduction:
        """The reduction of these images of the batch."""
        tensors: dict[str, Any] = {name: value[index] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def apply(self, x: Tensor, prefix: int = 0) -> Tensor:
        """Reduces a tensor: (B, N, ...) -> (B, K, ...).

        Args:
            x: the tensor, with `prefix` entries before those of the N tokens.
            prefix: they stay as they are: (B, P+N, ...) -> (B, P+K, ...).
        """
        flat = x.flatten(2) if x.dim() > 2 else x[..., None]  # (B, P+N, F)
        if self.weight is None and self.assigned is None:
            out = flat.flatten(0, 1).index_select(0, self._rows(prefix).flatten())
            out = out.view(x.shape[0], prefix + self.k, flat.shape[2])
        else:
            with torch.autocast(x.device.type, enabled=False):  # in fp32: bf16 shares do not add up to 1
                out = self._average(flat.float(), prefix).to(x.dtype)
        if self.gate is not None:
            out = torch.cat([out[:, :prefix], self._gated(out[:, prefix:])], dim=1)
        if self.finish is not None:
            out = torch.cat([out[:, :prefix], self.finish(out[:, prefix:]).to(x.dtype)], dim=1)
        return out.reshape(x.shape[0], prefix + self.k, *x.shape[2:])

    def _rows(self, prefix: int) -> Tensor:
        """Of a selection: for each output token, (B, P+K), its row in a batch of P+N tokens that is flattened."""
        if not prefix and self.index.shape[0] == 1:
            return self.index
        first = torch.arange(prefix, device=self.index.device).expand(self.index.shape[0], -1)
        starts = torch.arange(self.index.shape[0], device=self.index.device)[:, None] * (prefix + self.n)
        return torch.cat([first, self.index + prefix], dim=1) + starts if prefix else self.index + starts

    def _average(self, values: Tensor, prefix: int) -> Tensor:
        """The prefix and the means of the tokens, with their norms restored: (B, P+N, F) -> (B, P+K, F)."""
        tokens = values[:, prefix:]
        if self.weight is not None:
            weight = self.weight.float()
            means = weight @ tokens
            if self.norm:
                means = means * self._norm_factor(weight @ tokens.norm(dim=-1, keepdim=True), means)
            return torch.cat([values[:, :prefix], means], dim=1) if prefix else means
        out = self._add_members(values, prefix)
        if self.norm:
            assert self.assigned is not None and self.shares is not None
            lengths = tokens.norm(dim=-1) * self.shares  # (B, N)
            lengths = lengths.new_zeros(self.index.shape).scatter_add(1, self.assigned.clamp_min(0), lengths)  # (B, K)
            factor = self._norm_factor(lengths[..., None], out[:, prefix:])
            out = out * F.pad(factor, (0, 0, prefix, 0), value=1.0)
        return out

    def _add_members(self, values: Tensor, prefix: int) -> Tensor:
        """Of a merge: the prefix and the sum of the members of each group, by their shares: (B, P+N, F) -> (B, P+K, F).

        A bag of rows for each output token: no product of tokens and shares is stored, and sums have a fixed order on every
        device. Dropped tokens, whose share is 0, are in a bag of their own, the last of all.
        """
        assert self.assigned is not None and self.shares is not None
        batch, k = self.index.shape
        starts = torch.arange(batch, device=values.device)[:, None] * (prefix + k)
        bags = torch.where(self.assigned < 0, batch * (prefix + k), self.assigned + prefix + starts)  # (B, N)
        shares = self.shares.to(values.dtype)
        if prefix:
            first = torch.arange(prefix, device=values.device)
            bags = torch.cat([first + starts, bags], dim=1)  # (B, P+N)
            shares = F.pad(shares, (prefix, 0), value=1.0)
        if torch.compiler.is_exporting():  # engines that read exported graphs have no bags
            zeros = values.new_zeros((batch * (prefix + k) + 1, values.shape[2]))
            sums = zeros.index_add(0, bags.flatten(), (values * shares[..., None]).flatten(0, 1))
            return sums[:-1].view(batch, prefix + k, values.shape[2])
        order = bags.flatten().sort(stable=True)
        offsets = torch.searchsorted(order.values, torch.arange(batch * (prefix + k) + 1, device=values.device))
        sums = F.embedding_bag(
            order.indices, values.flatten(0, 1), offsets, mode="sum", per_sample_weights=shares.flatten()[order.indices]
        )
        return sums[:-1].view(batch, prefix + k, values.shape[2])

    def _gated(self, out: Tensor) -> Tensor:
        """The output tokens (B, K, F) with their gate, whose value is 1."""
        assert self.gate is not None
        gate = self.gate[..., None].to(out.dtype)
        if self.stand_in is None:
            return out * gate
        replacement = out.gather(1, self.stand_in[..., None].expand_as(out))
        return out + (gate - 1) * (out - replacement)

    def _norm_factor(self, lengths: Tensor, means: Tensor) -> Tensor:
        """(mean norm of the members (B, K, 1) / norm of their means (B, K, F)) ** norm: (B, K, 1).

        The ratio is at least 1. It is bounded, since members that point against each other have a mean of almost 0.
        """
        ratio = lengths / means.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        factor: Tensor = ratio.clamp(1.0, MAX_NORM_RATIO) ** self.norm
        return factor

    def zero_fill(self, x: Tensor) -> Tensor:
        """Reduces a tensor and keeps its length: outputs at the positions of `index`, 0 elsewhere. (B, N, ...) -> same."""
        index = self.index.reshape(self.index.shape + (1,) * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
        return torch.zeros_like(x).scatter(1, index, self.apply(x))

    def sizes_after(self, sizes: Tensor | None) -> Tensor | None:
        """The sizes (B, K) of the output tokens, from the sizes (B, N) of the input tokens. None: one each."""
        if self.sizes is not None:
            return self.sizes
        return None if sizes is None else sizes.gather(1, self.index)

    def as_weight(self) -> Tensor:
        """The reduction as a matrix (B, K, N), including its gate."""
        rows = self.weight
        if rows is None:
            rows = torch.zeros((*self.index.shape, self.n), device=self.index.device)
            if self.assigned is None:
                rows = rows.scatter(2, self.index[..., None], self.is_real()[..., None].float())
            else:
                assert self.shares is not None
                rows = rows.scatter(1, self.assigned.clamp_min(0)[:, None], self.shares.float()[:, None])
        return rows if self.gate is None else self._gated(rows)

    def then(self, other: Reduction) -> Reduction:
        """This reduction followed by another, as one reduction."""
        both = Reduction(
            index=self.index.gather(1, other.index),
            n=self.n,
            sizes=other.sizes_after(self.sizes),
            scores=self.scores,
            counts=other.counts,
        )
        if self.is_selection and other.is_selection:
            return both
        if any(each.weight is not None or each.gate is not None for each in (self, other)):
            return replace(both, weight=other.as_weight() @ self.as_weight())
        (first, first_shares), (second, second_shares) = (each._members() for each in (self, other))
        at = first.clamp_min(0)
        assigned = torch.where(first < 0, -1, second.gather(1, at))
        return replace(both, assigned=assigned, shares=first_shares * second_shares.gather(1, at))

    def _members(self) -> tuple[Tensor, Tensor]:
        """The output token of each input token and its share there, (B, N) each, of a merge or a selection."""
        groups = self.groups
        return groups, (groups >= 0).float() if self.shares is None else self.shares

    def rows(self, index: Tensor) -> Reduction:
        """Deprecated name of `select_images`."""
        _warn_renamed("Reduction.rows", "Reduction.select_images")
        return self.select_images(index)

    def carry_sizes(self, sizes: Tensor | None) -> Tensor | None:
        """Deprecated name of `sizes_after`."""
        _warn_renamed("Reduction.carry_sizes", "Reduction.sizes_after")
        return self.sizes_after(sizes)


def _warn_renamed(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name will be removed in the next release", DeprecationWarning, stacklevel=3)
