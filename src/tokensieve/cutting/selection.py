"""Token selection as plain functions, under the names that users of the CLIP benchmark expect.

Tokens are (B, 1+N, D) with CLS first. Every function has two forms, and each form has one way to count:

    with attention=     the attention of the model. Indices count patches (CLS has none), scores are (B, N).
    without             W_Q = W_K = identity: the attention softmax(x x^T / sqrt(D)) of the tokens among themselves. Indices are
                        positions in the sequence (CLS is 0, the first patch 1), scores are (B, 1+N).

attention= is a scoring.Attention, as get_image_features_with_tokens(model, images, return_attention=True) returns it. The
functions that compute one thing also take the block whose *input* the tokens are (an open_clip block, or an
nn.MultiheadAttention). With the attention of the block that returned the tokens, the result is that of the plan anchor@L.
To select inside a model, `tokensieve.apply(model, "anchor@6(k=10,m=50)")` is simpler.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.cutting.passes import check_integers
from tokensieve.errors import PlanWarning, UserError, describe_value
from tokensieve.methods import anchor as _anchor
from tokensieve.methods.registry import get_method
from tokensieve.models.features import get_image_features_with_tokens
from tokensieve.models.open_clip import OpenBlock
from tokensieve.models.pooling import split_heads
from tokensieve.plan import Plan, Where, make_step
from tokensieve.scoring import Attention, top

OWN_ATTENTION = "get_image_features_with_tokens(model, images, return_attention=True)"


def selection_plan(k: int = 10, m: int = 50, alpha: float = 0.5) -> Plan:
    """Token selection at the output of the tower as a plan: tokens that are not selected become zeros."""
    return Plan((make_step(get_method("anchor"), Where("out"), None, {"k": k, "m": m, "alpha": alpha, "rest": "zero"}),))


def apply_token_selection(
    features: Tensor,
    k: int = 10,
    m: int = 50,
    alpha: float = 0.5,
    enabled: bool = True,
    *,
    attention: Attention | None = None,
    model: nn.Module | None = None,
    images: Tensor | None = None,
    normalize: str = "minmax",
) -> Tensor:
    """CLS, the anchors and the m best others stay in place; every other position becomes 0, so the length stays the same.

    The attention is that of the last block of model for images, or `attention`. With neither it is softmax(x x^T / sqrt(D)) of
    the features (W_Q = W_K = identity), with a warning the first time. A pooled input (B, D) is returned as it is, and so is
    every input with enabled=False.
    """
    _check_options(k=k, m=m, alpha=alpha, normalize=normalize)
    if not enabled or (isinstance(features, Tensor) and features.dim() == 2):
        return features
    _check_tokens("features", features, " or (B, D)")
    if (model is None) != (images is None) or (model is not None and attention is not None):
        raise UserError("apply_token_selection takes model= and images= together, or attention=, or none of them")
    if isinstance(attention, nn.Module):
        raise UserError(
            f"attention={type(attention).__name__} does not say whether the features go into this module or come out of it; "
            f"pass model= and images=, or attention= as {OWN_ATTENTION} returns it"
        )
    n = features.shape[1] - 1
    if _keeps_everything(k, m, n):
        return features
    if model is not None and images is not None:
        *_, attention = get_image_features_with_tokens(model, images, return_attention=True)
        if attention is None:
            raise UserError(f"{type(model).__name__} has no tower with blocks, so it has no attention; leave model= out")
    if attention is None:
        _warn_of_identity()
        attention = _identity_attention(features, prefix=1)
    chosen = _choose(features, k, m, alpha, _attention_of(attention, features), normalize)
    return torch.cat([features[:, :1], chosen.zero_fill(features[:, 1:])], dim=1)


def select_anchor_tokens(tokens: Tensor, k: int = 10, *, attention: Attention | nn.Module | None = None) -> Tensor:
    """The k patches that CLS attends to most: (B, 1+N, D) -> (B, k) in raster order.

    With attention=, indices count patches. Without, W_Q = W_K = identity, and indices count CLS as 0.
    """
    _check_options(k=k)
    _check_tokens("tokens", tokens)
    count = min(k, tokens.shape[1] - 1)
    if attention is None:
        return 1 + top(_identity_attention(tokens, prefix=1).cls_row(), count)
    return top(_attention_of(attention, tokens).cls_row(), count)


def compute_importance_scores(tokens: Tensor, anchors: Tensor, *, attention: Attention | nn.Module | None = None) -> Tensor:
    """I: mean attention to the anchors, as in the whole softmax.

    With attention=, anchors count patches, and I is that of the patches, (B, N). Without, W_Q = W_K = identity, anchors count
    CLS as 0, and I is that of all tokens, (B, 1+N).
    """
    _check_tokens("tokens", tokens)
    _check_anchors(anchors, tokens, counts_cls=attention is None)
    if attention is None:
        return _anchor.importance(_identity_attention(tokens, prefix=0), anchors)
    return _anchor.importance(_attention_of(attention, tokens), anchors)


def compute_diversity_scores(tokens: Tensor, anchors: Tensor, *, attention: Attention | nn.Module | None = None) -> Tensor:
    """D: one minus the cosine to the most similar anchor.

    With attention= (which D does not depend on), anchors count patches, and D is that of the patches, (B, N). Without, anchors
    count CLS as 0, and D is that of all tokens, (B, 1+N).
    """
    _check_tokens("tokens", tokens)
    _check_anchors(anchors, tokens, counts_cls=attention is None)
    return _anchor.diversity(tokens if attention is None else tokens[:, 1:], anchors)


@overload
def select_tokens_with_scoring(
    tokens: Tensor,
    k: int = 10,
    m: int = 50,
    alpha: float = 0.5,
    *,
    attention: Attention | nn.Module,
    normalize: str = "minmax",
) -> Tensor: ...


@overload
def select_tokens_with_scoring(
    tokens: Tensor,
    anchors: Tensor,
    importance: Tensor,
    diversity: Tensor,
    m: int = 50,
    alpha: float = 0.5,
    *,
    normalize: str = "minmax",
) -> Tensor: ...


def select_tokens_with_scoring(tokens: Tensor, *args: Any, **options: Any) -> Tensor:
    """Anchors and the m best others.

    select_tokens_with_scoring(tokens, k, m, alpha, attention=...) returns their indices, (B, min(k+m, N)) in raster order,
    which count patches. select_tokens_with_scoring(tokens, anchors, importance, diversity, m, alpha), with what the other
    functions return without attention=, returns the tokens (B, 1+N, D) with 0 at every other position; there anchors count
    CLS as 0.
    """
    if (args and isinstance(args[0], Tensor)) or "anchors" in options:
        return _zero_fill_by_scores(tokens, *args, **options)
    return _select_by_attention(tokens, *args, **options)


def _select_by_attention(
    tokens: Tensor,
    k: int = 10,
    m: int = 50,
    alpha: float = 0.5,
    *,
    attention: Attention | nn.Module | None = None,
    normalize: str = "minmax",
) -> Tensor:
    _check_options(k=k, m=m, alpha=alpha, normalize=normalize)
    _check_tokens("tokens", tokens)
    if attention is None:
        raise UserError(
            "select_tokens_with_scoring takes (tokens, k, m, alpha, attention=...) or (tokens, anchors, importance, diversity, "
            "m, alpha); for tokens alone use apply_token_selection"
        )
    n = tokens.shape[1] - 1
    if _keeps_everything(k, m, n):
        return torch.arange(n, device=tokens.device).expand(tokens.shape[0], -1)
    return _choose(tokens, k, m, alpha, _attention_of(attention, tokens), normalize).index


def _zero_fill_by_scores(
    tokens: Tensor,
    anchors: Tensor,
    importance: Tensor,
    diversity: Tensor,
    m: int = 50,
    alpha: float = 0.5,
    *,
    normalize: str = "minmax",
) -> Tensor:
    _check_tokens("tokens", tokens)
    _check_anchors(anchors, tokens, counts_cls=True)
    k, n = anchors.shape[1], tokens.shape[1] - 1
    _check_options(k=k, m=m, alpha=alpha, normalize=normalize)
    for name, scores in (("importance", importance), ("diversity", diversity)):
        if not isinstance(scores, Tensor) or scores.shape != tokens.shape[:2]:
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else describe_value(scores)
            raise UserError(f"{name} has one score for each token, CLS included: {tuple(tokens.shape[:2])}, not {shape}")
    if _keeps_everything(k, m, n):
        return tokens
    scores = _anchor.combine(importance[:, 1:], diversity[:, 1:], alpha, normalize)
    chosen = _anchor.select(scores, anchors - 1, k + m)
    return torch.cat([tokens[:, :1], chosen.zero_fill(tokens[:, 1:])], dim=1)


def _choose(tokens: Tensor, k: int, m: int, alpha: float, attention: Attention, normalize: str) -> Reduction:
    view = View(tokens=tokens[:, 1:], prefix=tokens[:, :1], grid=None, attention=attention)
    options: dict[str, Any] = {"k": k, "m": m, "alpha": alpha, "normalize": normalize}
    return _anchor.anchor(view, k + m, **options)


# ----------------------------------------------------------------------------------------------------------------- checks


def _keeps_everything(k: int, m: int, n: int) -> bool:
    """Whether k + m reach the number of patches; then nothing has to be computed, with a warning."""
    if k + m < n:
        return False
    warnings.warn(f"k+m={k + m} is not below the {n} patches: everything is kept", PlanWarning, stacklevel=4)
    return True


def _check_options(**options: Any) -> None:
    make_step(get_method("anchor"), options=options)


def _check_tokens(name: str, tokens: Any, or_else: str = "") -> None:
    wanted = f"{name} are a tensor of floating point numbers of shape (B, 1+N, D){or_else}"
    if not isinstance(tokens, Tensor):
        raise UserError(f"{wanted}, not {describe_value(tokens)}")
    if not tokens.is_floating_point() or tokens.dim() != 3 or tokens.shape[1] < 2:
        raise UserError(f"{wanted}, not {tokens.dtype} of shape {tuple(tokens.shape)}")


def _check_anchors(anchors: Tensor, tokens: Tensor, counts_cls: bool) -> None:
    """A UserError unless these are patches, counted from 1 after CLS (counts_cls) or from 0."""
    check_integers("anchors", "(B, k)", anchors, dim=2)
    if not anchors.numel() or anchors.shape[0] != tokens.shape[0]:
        raise UserError(f"anchors have the shape (B, k) with B = {tokens.shape[0]} and k >= 1, not {tuple(anchors.shape)}")
    first = int(counts_cls)
    last = tokens.shape[1] - 2 + first
    low, high = int(anchors.min()), int(anchors.max())
    if low < first or high > last:
        form = (
            "without attention= they count CLS as 0"
            if counts_cls
            else "with attention= they count patches, and CLS has no number"
        )
        raise UserError(f"anchors from {low} to {high}: the patches are {first} to {last} here; {form}")


# -------------------------------------------------------------------------------------------------------------- attention


@functools.cache
def _warn_of_identity() -> None:
    """Says once what the choice is made by, and how far it is from the model's."""
    warnings.warn(
        "apply_token_selection has no attention of the model, so it uses W_Q = W_K = identity, which chooses other patches: on "
        "the embedded model 21 of the 60 kept ones are the same, 18 would be by chance. For the model's own attention pass "
        f"model= and images=, or attention= from {OWN_ATTENTION}",
        PlanWarning,
        stacklevel=3,
    )


def _identity_attention(tokens: Tensor, prefix: int) -> Attention:
    """softmax(x x^T / sqrt(D)), one head. prefix=0: indices count CLS as 0."""
    heads = tokens[:, None]  # (B, 1, 1+N, D)
    return Attention(heads, heads, prefix=prefix, scale=tokens.shape[-1] ** -0.5)


def _attention_of(attention: Attention | nn.Module, tokens: Tensor) -> Attention:
    """The attention for these tokens: as it is, or that of a block or an nn.MultiheadAttention whose input they are."""
    if isinstance(attention, Attention):
        images, patches = attention.q.shape[0], attention.q.shape[2] - attention.prefix
        if (images, patches) != (tokens.shape[0], tokens.shape[1] - 1):
            raise UserError(
                f"the attention is of {images} images with {patches} patches, the tokens are of {tokens.shape[0]} images with "
                f"{tokens.shape[1] - 1}"
            )
        return attention
    if isinstance(attention, nn.MultiheadAttention):
        _check_width(attention, tokens)
        width = tokens.shape[-1]
        offset = attention.in_proj_bias
        both = F.linear(tokens, attention.in_proj_weight[: 2 * width], None if offset is None else offset[: 2 * width])
        q, k = (split_heads(part, attention.num_heads) for part in both.chunk(2, dim=-1))  # (B, H, 1+N, d) each
        return Attention(q, k, prefix=1, scale=q.shape[-1] ** -0.5)
    if hasattr(attention, "attn") and hasattr(attention, "ln_1"):
        _check_width(attention.attn, tokens)
        return OpenBlock(attention, prefix=1).attention_at(tokens)
    raise UserError(
        f"attention is {describe_value(attention)}; pass a block of the model, an nn.MultiheadAttention or an Attention"
    )


def _check_width(attention: Any, tokens: Tensor) -> None:
    width = attention.in_proj_weight.shape[1]
    if width != tokens.shape[-1]:
        raise UserError(
            f"attention= has width {width}, the tokens {tokens.shape[-1]}: they do not go into this block. For tokens that "
            f"leave the tower pass attention= from {OWN_ATTENTION}"
        )
