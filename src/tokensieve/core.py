"""What a method sees (View) and what it answers (Reduction)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tokensieve.scoring import Attention, noise


@dataclass
class Question:
    """The text that came with images: of every image, its own."""

    tokens: Tensor  # (B, T, E), what the language model has of them at this point: input embeddings, or hidden states
    mask: Tensor  # (B, T), False: no token here

    def rows(self, index: Tensor) -> Question:
        """The questions of these rows."""
        return Question(self.tokens[index], self.mask[index])


@dataclass
class View:
    """All that a method may see of the tokens at one cut. Prefix tokens (CLS, registers) are not among the tokens."""

    tokens: Tensor  # (B, N, D), the patches that arrived here, in raster order
    prefix: Tensor  # (B, P, D)
    grid: tuple[int, int] | None  # (h, w) while every patch is still in its place, else None
    attention: Attention | None = None  # of the block that was just run, where the method says it needs it
    sizes: Tensor | None = None  # (B, N), how many patches each token stands for; None: one each
    samples: Tensor | None = None  # (B,), the number of each image within the run
    seed: int = 0
    context: Mapping[str, Any] = field(default_factory=dict)  # question, class names, other modalities ...
    part: Any = None  # the method's trained module, where it has one
    pooling: Callable[[View], Tensor] | None = None  # (B, N), attention of the pooling query, where the tower has one
    place: str = ""  # where this is: "6", "6.attn", "out", "llm.10"
    question: Question | None = None  # where a language model reads the tokens
    has_cls: bool = True  # the first prefix token, if there is any, is CLS (or, after the tower, the global feature)

    @property
    def n(self) -> int:
        return self.tokens.shape[1]

    def noise(self) -> Tensor:
        """Uniform numbers, (B, N), the same for an image in whatever batch it comes."""
        samples = self.samples
        if samples is None:
            samples = torch.arange(self.tokens.shape[0], device=self.tokens.device)
        return noise(samples, self.n, self.seed)

    def global_token(self) -> Tensor:
        """What stands for the whole image, (B, D): the CLS token, without one the mean token."""
        return self.prefix[:, 0] if self.has_cls and self.prefix.shape[1] else self.tokens.mean(1)

    def coarse(self) -> Tensor:
        """A_coarse, (B, N): how much the token that becomes the image feature attends to each patch.

        The CLS row of the block's attention; without a CLS token the attention of the pooling query (MAP heads); without
        either the mean attention that a patch receives.
        """
        if self.attention is not None and self.attention.has_cls and self.attention.prefix:
            return self.attention.cls_row()
        if self.pooling is not None:
            return self.pooling(self)
        if self.attention is None:
            raise ValueError('A_coarse needs the attention of a block: register the method with needs=("attention",)')
        return self.attention.received()

    def sizes_or_ones(self) -> Tensor:
        """Sizes as numbers, (B, N) float32, ones where nothing was merged yet."""
        if self.sizes is not None:
            return self.sizes
        return torch.ones(self.tokens.shape[:2], device=self.tokens.device)


@dataclass
class Reduction:
    """Which tokens, or which mixtures of tokens, go on.

    index names for every output token the input token that stands for it. Without weight the reduction is a gather of
    index; with weight (B, K, N) it is a matrix product, and index is what to draw. Either way apply() carries any
    (B, N, ...) tensor through the same decision.
    """

    index: Tensor  # (B, K), ascending where it is a selection
    n: int
    weight: Tensor | None = None  # (B, K, N)
    sizes: Tensor | None = None  # (B, K), patches each output token stands for; None: as many as its index stood for
    scores: Tensor | None = None  # (B, N), what the choice was made by
    gate: Tensor | None = None  # (B, K), 1 forward, the scores' gradient backward: straight-through training
    anchors: Tensor | None = None  # (B, A), input tokens that the method singles out: pictures mark them
    soft: Tensor | None = None  # (B, N), probabilities of staying: nothing is dropped, later attention adds their logarithms

    @classmethod
    def keep(
        cls,
        index: Tensor,
        n: int,
        scores: Tensor | None = None,
        gate: Tensor | None = None,
        anchors: Tensor | None = None,
    ) -> Reduction:
        """Selection: the chosen tokens go on as they are, in raster order."""
        index, order = index.sort(dim=-1)
        return cls(index, n, scores=scores, gate=None if gate is None else gate.gather(1, order), anchors=anchors)

    @classmethod
    def merge(cls, groups: Tensor, index: Tensor, sizes: Tensor, scores: Tensor | None = None) -> Reduction:
        """Merging: the size-weighted mean of each group goes on.

        groups (B, N): the output token each input token joins, -1 for none; index (B, K): who stands for each group;
        sizes (B, N): how many patches each input token stands for.
        """
        k, n = index.shape[1], groups.shape[1]
        joined = sizes * (groups >= 0)  # (B, N)
        weight = sizes.new_zeros((groups.shape[0], k, n))
        weight.scatter_(1, groups.clamp_min(0)[:, None], joined[:, None])
        mass = weight.sum(-1)  # (B, K)
        return cls(index=index, n=n, weight=weight / mass[..., None], sizes=mass, scores=scores)

    @property
    def k(self) -> int:
        return self.index.shape[1]

    @property
    def groups(self) -> Tensor:
        """The output token each input token went to, -1 where it was dropped: (B, N)."""
        if self.weight is not None:
            share, where = self.weight.max(dim=1)
            return where.masked_fill(share <= 0, -1)
        places = torch.arange(self.k, device=self.index.device).expand_as(self.index)
        return self.index.new_full((self.index.shape[0], self.n), -1).scatter_(1, self.index, places)

    def select_images(self, index: Tensor) -> Reduction:
        """What is done to these images."""
        parts: dict[str, Any] = {name: value[index] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **parts)

    def apply(self, x: Tensor) -> Tensor:
        """(B, N, ...) -> (B, K, ...)."""
        flat = x.reshape(x.shape[0], self.n, -1)  # (B, N, F)
        if self.weight is not None:
            out = (self.weight @ flat.float()).to(x.dtype)  # means in fp32: bf16 weights do not add up to 1
        else:
            out = flat.gather(1, self.index[..., None].expand(-1, -1, flat.shape[2]))
        if self.gate is not None:
            out = out * self.gate[..., None].to(x.dtype)
        return out.reshape(x.shape[0], self.k, *x.shape[2:])

    def zero_fill(self, x: Tensor) -> Tensor:
        """The length stays: output tokens stand where their index was, every other position is 0. (B, N, ...) -> same."""
        index = self.index.reshape(self.index.shape + (1,) * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
        return torch.zeros_like(x).scatter(1, index, self.apply(x))

    def sizes_after(self, sizes: Tensor | None) -> Tensor | None:
        """The sizes after this reduction of tokens that had these sizes before it; None means one each."""
        if self.sizes is not None:
            return self.sizes
        return None if sizes is None else sizes.gather(1, self.index)

    def as_weight(self) -> Tensor:
        """The reduction as a matrix (B, K, N), its gate included, whichever form it has."""
        rows = self.weight
        if rows is None:
            rows = torch.zeros((*self.index.shape, self.n), device=self.index.device)
            rows = rows.scatter(2, self.index[..., None], 1.0)
        return rows if self.gate is None else rows * self.gate[..., None]

    def then(self, other: Reduction) -> Reduction:
        """This reduction and then another, as one from the first's input to the second's output."""
        plain = all(part.weight is None and part.gate is None for part in (self, other))
        return Reduction(
            index=self.index.gather(1, other.index),
            n=self.n,
            weight=None if plain else other.as_weight() @ self.as_weight(),
            sizes=other.sizes_after(self.sizes),
            scores=self.scores,
        )
