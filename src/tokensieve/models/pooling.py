"""How models make one feature of many tokens, for tokens that stand for several patches, and for one token alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.models.patching import Patch
from tokensieve.models.tower import Sizes, Undo
from tokensieve.models.wrapped import attention_weights
from tokensieve.scoring import full_precision


def weighted_mean(tokens: Tensor, sizes: Tensor) -> Tensor:
    """The mean of the patches that the tokens stand for: (B, K, D), (B, K) -> (B, D)."""
    mean = (tokens.float() * sizes[..., None]).sum(1) / sizes.sum(-1, keepdim=True)
    return mean.to(tokens.dtype)


def zero_empty_tokens(tokens: Tensor, sizes: Tensor) -> Tensor:
    """Tokens that stand for nothing (rest=zero) are 0 again, whatever a norm made of them: (B, K, D) -> same."""
    return tokens * (sizes > 0)[..., None]


def blank_after(norm: nn.Module, prefix: int, sizes: Sizes) -> Undo:
    """Has blank() done to the patches that leave the tower's last norm (B, P+K, D)."""

    def look(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        size = sizes()
        return out if size is None else torch.cat([out[:, :prefix], zero_empty_tokens(out[:, prefix:], size)], dim=1)

    return norm.register_forward_hook(Patch(look)).remove


def log_sizes(sizes: Tensor, keys: int) -> Tensor:
    """log(size) for each key of a pooling attention, (B, 1, 1, keys): a token of size s counts as s tokens.

    keys may include prefix tokens, which stand for themselves.
    """
    return F.pad(sizes.log(), (keys - sizes.shape[1], 0))[:, None, None]


def bias_pooler(attention: nn.MultiheadAttention, sizes: Sizes) -> Undo:
    """Makes attentional pooling by an nn.MultiheadAttention(query, tokens, tokens) see sizes."""

    def add_bias(module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        size = sizes()
        if size is not None:
            query, key = args[0], args[1]
            bias = log_sizes(size, key.shape[1]).expand(-1, attention.num_heads, query.shape[1], -1).flatten(0, 1)
            kwargs = kwargs | {"attn_mask": bias.to(query.dtype)}
        return args, kwargs

    return attention.register_forward_pre_hook(Patch(add_bias), with_kwargs=True).remove


def pool_single_token(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """What the attention answers to any query when a token is the only one it sees: (..., D) -> (..., E)."""
    width = attention.embed_dim
    offset = None if attention.in_proj_bias is None else attention.in_proj_bias[2 * width :]
    if attention.in_proj_weight is None:
        weight, output = attention.v_proj_weight, attention.out_proj.weight
    else:
        joint, output = attention_weights(attention)
        weight = joint[2 * width :]
    return F.linear(F.linear(x, weight, offset), output, attention.out_proj.bias)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H*d) -> (B, H, T, d)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


@full_precision
def query_row(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of pooling queries to all keys, mean over heads and queries, in float32.

    q: (B or 1, H, L, d), k: (B, H, T, d), bias: (B, 1, 1, T) -> (B, T)
    """
    logits = (q.float() * q.shape[-1] ** -0.5) @ k.float().transpose(-1, -2)  # (B, H, L, T)
    if bias is not None:
        logits = logits + bias.float()
    return logits.softmax(-1).mean((1, 2))
