"""Building blocks of scores: exact attention entries without the N x N matrix, cosines, min-max, stable top-k.

All scores are float32, whatever the dtype of the model: with bf16 scores, a third of the rows had ties across the cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

MAX_ENTRIES = 1 << 22  # cosines of an image in memory at a time
ROWS_AT_ONCE = 128  # rows of logits in memory at a time, if the kernel does not return the log-sum-exp


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Runs the function outside of autocast, which would round every product to 16 bits."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            return function(*args, **kwargs)
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return wrapped


@dataclass
class TextRows:
    """The tokens of the question in the attention of a decoder layer, in the order of `View.question`."""

    q: Tensor  # (B, H, T, d)
    k: Tensor  # (B, H, T, d)
    lse: Tensor  # (B, H, T), log-sum-exp of each row over all tokens that it may see
    mask: Tensor  # (B, T), False: padding
    follows: Tensor  # (B, T), the token can attend to the last token of the image: it stands behind it, or in one block with it
    sees: Tensor | None = None  # (B, T, N), the patches that a token can attend to, in a layer with a window; None: all


@dataclass
class Attention:
    """The attention of one block, as entries on demand: softmax over all keys, mean over heads.

    With the log-sum-exp of each row, any entry is exp(q_i . k_j * scale + bias_j - lse_i). So N x k entries cost N x k
    products, and the N x N matrix is never stored. On the CPU the fused kernel of the block's own attention also returns the
    log-sum-exp. Elsewhere it is computed in blocks of rows when it is first needed.
    """

    queries: Tensor | Callable[[], Tensor]  # (B, H, P+N, d), or a function that computes them when they are first needed
    k: Tensor  # (B, H, P+N, d)
    prefix: int  # P, the tokens before the patches
    scale: float
    bias: Tensor | None = None  # (B, 1, 1, P+N), added to the logits of each key
    lse: Tensor | None = field(default=None)  # (B, H, P+N)
    has_cls: bool = True  # the first prefix token is CLS; False: they are registers, or there is none
    row: Tensor | None = None  # (B, N), the attention from CLS to each patch, if it is known
    first_lse: Tensor | None = None  # (B, H, 1), the log-sum-exp of the first row, if that is over other keys than k
    first_sees: Tensor | None = None  # (B, P+N), the keys that the first row can attend to; None: all
    v: Tensor | None = None  # (B, H, P+N, d), the values; None in a decoder
    text: TextRows | Callable[[], TextRows] | None = None  # in a decoder: the question at the same layer
    cap: float | None = None  # logits are soft-capped to +-cap before the bias; None: they are not

    @property
    def q(self) -> Tensor:
        """The queries, (B, H, P+N, d)."""
        if not isinstance(self.queries, Tensor):
            self.queries = self.queries()
        return self.queries

    def cls_row(self) -> Tensor:
        """The attention from CLS to each patch, (B, N)."""
        if self.prefix == 0 or not self.has_cls:
            raise UserError("this tower has no CLS token, so there is no CLS row; use View.coarse()")
        if self.row is not None:
            return self.row
        logits = self._logits(self.q[:, :, :1], self.k)  # (B, H, 1, P+N)
        row = logits.softmax(-1) if self.lse is None else (logits - self.lse[:, :, :1, None]).exp()
        return row.mean(1)[:, 0, self.prefix :]  # (B, N)

    def cls_heads(self) -> Tensor:
        """The attention from CLS (in a decoder: from the last token of the prompt) to each patch, of each head: (B, H, N)."""
        logits = self._logits(self.q[:, :, :1], self.k)  # (B, H, 1, P+N)
        if self.first_sees is not None:
            logits = logits.masked_fill(~self.first_sees[:, None, None], -torch.inf)
        lse = self.first_lse if self.first_lse is not None else None if self.lse is None else self.lse[:, :, :1]
        entries = logits.softmax(-1) if lse is None else (logits - lse[..., None]).exp()
        return entries[:, :, 0, self.prefix :]

    def text_heads(self) -> Tensor:
        """The attention from each token of the question to each patch, of each head: (B, H, T, N). Padding, and words that
        cannot see a patch, have zeros."""
        text = self.question_rows()
        logits = self._logits(text.q, self.k[:, :, self.prefix :], columns=self._patch_columns())  # (B, H, T, N)
        seen = (text.mask & text.follows)[..., None]
        seen = seen if text.sees is None else seen & text.sees  # (B, T, 1 or N)
        return (logits - text.lse[..., None]).exp().masked_fill(~seen[:, None], 0.0)

    def question_rows(self) -> TextRows:
        """The question at this layer; a UserError outside of a decoder."""
        if self.text is None:
            raise UserError("there is no text in this attention: it is not that of a language model")
        if not isinstance(self.text, TextRows):
            self.text = self.text()
        return self.text

    def _patch_columns(self) -> Tensor:
        index = torch.arange(self.prefix, self.k.shape[2], device=self.k.device)
        return index.expand(self.k.shape[0], -1)

    def columns(self, index: Tensor) -> Tensor:
        """The attention from every patch to the patches at `index` (B, k): (B, N, k)."""
        keys = gather_tokens(self.k, index + self.prefix)  # (B, H, k, d)
        logits = self._logits(self.q[:, :, self.prefix :], keys, columns=index + self.prefix)  # (B, H, N, k)
        return (logits - self.row_lse()[:, :, self.prefix :, None]).exp().mean(1)  # (B, N, k)

    def received(self) -> Tensor:
        """The attention that each patch receives, mean over all queries: (B, N)."""
        total = self.q.shape[2]
        received = self.q.new_zeros((self.q.shape[0], total), dtype=torch.float32)
        for entries in self.row_blocks():
            received += entries.mean(1).sum(1)
        return received[:, self.prefix :] / total  # (B, N)

    def row_blocks(self) -> Iterator[Tensor]:
        """All rows, some at a time, of each head: (B, H, rows, P+N). The whole matrix is never stored."""
        lse = self.lse if self.first_lse is None else self.row_lse()
        for start in range(0, self.q.shape[2], ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            logits = self._logits(self.q[:, :, rows], self.k)  # (B, H, rows, P+N)
            yield logits.softmax(-1) if lse is None else (logits - lse[:, :, rows, None]).exp()

    def weights(self) -> Tensor:
        """The whole matrix, of each head: (B, H, P+N, P+N)."""
        return (self._logits(self.q, self.k) - self.row_lse()[..., None]).exp()

    def keys(self) -> Tensor:
        """The keys of the patches, mean over heads, (B, N, d), for methods that compare tokens."""
        return self.k[:, :, self.prefix :].float().mean(1)  # (B, N, d)

    def select(self, index: Tensor) -> Attention:
        """The same entries for the patches at `index` (B, K), not normalised again: an Attention of P+K tokens."""
        first = torch.arange(self.prefix, device=index.device).expand(index.shape[0], -1)
        rows = torch.cat([first, index + self.prefix], dim=1)  # (B, P+K)
        lse = self.row_lse().gather(2, rows[:, None].expand(-1, self.q.shape[1], -1))
        q, k = gather_tokens(self.q, rows), gather_tokens(self.k, rows)
        bias = None if self.bias is None else self.bias.gather(-1, rows[:, None, None])
        row = None if self.row is None else self.row.gather(1, index)
        v = None if self.v is None else gather_tokens(self.v, rows)
        return Attention(q, k, self.prefix, self.scale, bias, lse, self.has_cls, row, v=v, cap=self.cap)

    def select_images(self, index: Tensor, n: int) -> Attention:
        """The same entries for the first n patches of these images (G,) of the batch, in a tower. The others are padding."""
        end = self.prefix + n
        q, k = self.q[index, :, :end], self.k[index, :, :end]
        bias = None if self.bias is None else self.bias[index, ..., :end]
        lse = None if self.lse is None else self.lse[index, :, :end]
        row = None if self.row is None else self.row[index, :n]
        v = None if self.v is None else self.v[index, :, :end]
        return Attention(q, k, self.prefix, self.scale, bias, lse, self.has_cls, row, v=v, cap=self.cap)

    @full_precision
    def _logits(self, q: Tensor, k: Tensor, columns: Tensor | None = None) -> Tensor:
        logits = cap_logits((q.float() * self.scale) @ k.float().transpose(-1, -2), self.cap)
        if self.bias is None:
            return logits
        bias = self.bias.to(self.k.dtype).float()  # as attend() hands it to the kernel
        if columns is not None:
            bias = bias.gather(-1, columns[:, None, None])
        return logits + bias

    def row_lse(self) -> Tensor:
        if self.lse is None:
            blocks = self.q.split(ROWS_AT_ONCE, dim=2)
            lse = torch.cat([_logsumexp_(self._logits(rows, self.k)) for rows in blocks], dim=2)
            self.lse = lse if self.first_lse is None else torch.cat([self.first_lse, lse[:, :, 1:]], dim=2)
        return self.lse


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Logits soft-capped to +-cap, as in Gemma 2; unchanged if it is None."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _logsumexp_(logits: Tensor) -> Tensor:
    """logits.logsumexp(-1) in the memory of the logits, which takes half the time."""
    largest = logits.detach().amax(-1, keepdim=True)
    return logits.sub_(largest).exp_().sum(-1).log() + largest[..., 0]


def flat_index(at: Tensor, length: int) -> Tensor:
    """Positions (B, K) in rows of this length, as positions in the flattened rows: copying whole rows is faster."""
    if at.shape[0] == 1:
        return at[0]
    return (at + torch.arange(at.shape[0], device=at.device)[:, None] * length).flatten()


def gather_rows(x: Tensor, at: Tensor) -> Tensor:
    """The states x (B, L, D) at these positions (B, K): (B, K, D)."""
    return x.flatten(0, 1).index_select(0, flat_index(at, x.shape[1])).view(*at.shape, x.shape[2])


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """The tokens index (B, K) of x (B, H, T, d): (B, H, K, d). (torch.take_along_dim would fix B in an exported graph.)"""
    if x.shape[0] == 1 and not torch.compiler.is_compiling():
        return x.index_select(2, index[0])  # copies whole rows
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """softmax(q k^T * scale + bias) v by the fused kernel, and the log-sum-exp of its rows if the kernel returns it.

    q, k, v: (B, H, T, d); bias: (B, 1, 1, T) or None. An exported graph is for any device and engine, so it has no such kernel.
    """
    if bias is not None:
        bias = bias.to(q.dtype)
    has_kernel = q.device.type == "cpu" and not torch.compiler.is_exporting()
    if has_kernel and not (bias is not None and bias.requires_grad):  # that kernel has no gradient for a bias
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        return out, _KernelSum.apply(q, k, bias, scale, lse) if out.requires_grad else lse.float()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale), None


class _KernelSum(torch.autograd.Function):
    """The log-sum-exp that the kernel returned, with its gradient, which the kernel does not have.

    Methods that merge by attention pass it on. It is computed in blocks of rows, in the backward pass, if it is needed there.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, bias: Tensor | None, scale: float, lse: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, bias, lse)
        ctx.scale = scale
        return lse.detach().float()

    @staticmethod
    @full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, bias, lse = ctx.saved_tensors  # (B, H, T, d), ..., (B, 1, 1, T) or None, (B, H, T)
        keys, of_queries, of_keys = k.float(), [], torch.zeros_like(k, dtype=torch.float32)
        for start in range(0, q.shape[2], ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            queries = q[:, :, rows].float() * ctx.scale
            logits = queries @ keys.transpose(-1, -2)  # (B, H, rows, T)
            logits = logits if bias is None else logits + bias.float()
            shares = (logits - lse[:, :, rows, None].float()).exp() * grad[:, :, rows, None]
            of_queries.append(shares @ keys * ctx.scale)
            of_keys += shares.transpose(-1, -2) @ queries
        return torch.cat(of_queries, dim=2).to(q.dtype), of_keys.to(k.dtype), None, None, None


@full_precision
def euclidean(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean distances, float32: (B, R, D), (B, N, D) -> (B, R, N). Equal tokens are at 0, but for the rounding.

    On the CPU products of float64 make them, which takes a fifth of the time of differences.
    """
    if x.device.type != "cpu":
        return torch.cdist(x.float(), y.float(), compute_mode="donot_use_mm_for_euclid_dist")
    a, b = x.double(), y.double()
    squares = a.square().sum(-1)[:, :, None] + b.square().sum(-1)[:, None] - 2 * a @ b.transpose(1, 2)
    return squares.clamp_min(0).sqrt().float()


@full_precision
def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cosines between two sets of tokens: (B, N, D), (B, K, D) -> (B, N, K)."""
    return F.normalize(x.float(), dim=-1) @ F.normalize(y.float(), dim=-1).transpose(1, 2)


def most_similar(x: Tensor, y: Tensor) -> Tensor:
    """For each token of x the token of y with the highest cosine: (B, N, D), (B, K, D) -> (B, N).

    A large N x K matrix is made in blocks of rows, whose size does not depend on the batch.
    """
    rows = max(1, MAX_ENTRIES // y.shape[1])
    if x.shape[1] <= rows:
        return cosine(x, y).argmax(-1)
    return torch.cat([cosine(block, y).argmax(-1) for block in x.split(rows, dim=1)], dim=1)


def minmax(scores: Tensor) -> Tensor:
    """Scores of each image scaled to [0, 1]; equal scores become 0. (B, N) -> (B, N)."""
    low, high = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
    return (scores - low) / (high - low).clamp_min(torch.finfo(scores.dtype).tiny)


def top(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest scores of each image, in raster order; of equal scores the first wins. (B, N) -> (B, count)."""
    order = scores.float().sort(dim=-1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=-1).values


def positions(mask: Tensor, count: int) -> Tensor:
    """Where the mask (B, N) is True, in raster order: (B, count). Each image has `count` such tokens.

    (`nonzero` has a size that depends on values, which no graph can hold.)
    """
    return (~mask).to(torch.uint8).sort(dim=1, stable=True).indices[:, :count]


def noise(samples: Tensor, n: int, seed: int) -> Tensor:
    """Uniform random numbers in [0, 1) that depend on the seed and the number of the image, not on the batch: (B,) -> (B, n).

    A counter-based generator (two rounds of multiply and xor-shift on 64-bit integers), so that the numbers of any image can be
    computed without those of the images before it.
    """
    token = torch.arange(n, device=samples.device, dtype=torch.int64)
    x = samples.long()[:, None] * 0x1E3779B97F4A7C15 + token * 0x3C6EF372FE94F82B
    x = x + (seed + 1) * 0x2545F4914F6CDD1D % (1 << 62)
    for multiplier in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * multiplier
    x = (x ^ ((x >> 31) & 0x1FFFFFFFF)) & 0xFFFFFF
    return x.float() / float(1 << 24)
