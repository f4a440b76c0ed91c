"""Token selection and pruning in the tower as plain functions, under the names that users of the CLIP benchmark expect.

tokens are (B, 1 + N, D) with CLS first; indices count patches, without CLS. attention is the attention of the model: the block
whose *input* the tokens are (an open_clip block, or an nn.MultiheadAttention), or a scoring.Attention. With a scoring.Attention
from the input of the block that returned the tokens, the result is that of the plan anchor@L.
To select inside a model, `tokensieve.apply(model, "anchor@6(k=10,m=50)")` is simpler.
"""

from __future__ import annotations

import threading
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.cutting.handle import Handle, apply
from tokensieve.cutting.passes import Row, check_integers
from tokensieve.errors import PlanWarning, UserError, describe_value
from tokensieve.methods import anchor as _anchor
from tokensieve.methods.registry import get_method
from tokensieve.models.features import encode_image
from tokensieve.models.open_clip import OpenBlock
from tokensieve.models.patching import PerThread
from tokensieve.models.pooling import split_heads
from tokensieve.plan import Plan, Where, make_step
from tokensieve.scoring import Attention, top

_pruning = threading.RLock()  # one PrunedVisionEncoder at a time has its plan on its tower


def select_anchor_tokens(tokens: Tensor, k: int = 10, *, attention: Attention | nn.Module) -> Tensor:
    """The k patches that CLS attends to most: (B, 1+N, D) -> (B, k) in raster order."""
    _check_options(k=k)
    _check_tokens("tokens", tokens)
    return top(_attention_of(attention, tokens).cls_row(), min(k, tokens.shape[1] - 1))


def compute_importance_scores(tokens: Tensor, anchors: Tensor, *, attention: Attention | nn.Module) -> Tensor:
    """I: mean attention of each patch to the anchors, as in the whole softmax: (B, N)."""
    _check_tokens("tokens", tokens)
    check_integers("anchors", "(B, k)", anchors, dim=2)
    return _anchor.importance(_attention_of(attention, tokens), anchors)


def compute_diversity_scores(tokens: Tensor, anchors: Tensor) -> Tensor:
    """D: one minus the cosine to the most similar anchor: (B, N)."""
    _check_tokens("tokens", tokens)
    check_integers("anchors", "(B, k)", anchors, dim=2)
    return _anchor.diversity(tokens[:, 1:], anchors)


def select_tokens_with_scoring(
    tokens: Tensor,
    k: int = 10,
    m: int = 50,
    alpha: float = 0.5,
    *,
    attention: Attention | nn.Module,
    normalize: str = "minmax",
) -> Tensor:
    """Anchors and the m best others: (B, min(k+m, N)) in raster order."""
    return _select(tokens, k, m, alpha, attention, normalize).index


def apply_token_selection(
    features: Tensor,
    k: int = 10,
    m: int = 50,
    alpha: float = 0.5,
    *,
    attention: Attention | nn.Module | None = None,
    normalize: str = "minmax",
) -> Tensor:
    """CLS, the anchors and the m best others stay in place; every other position becomes 0, so the length stays the same.

    A pooled input (B, D) is returned as it is.
    """
    _check_options(k=k, m=m, alpha=alpha, normalize=normalize)
    if isinstance(features, Tensor) and features.dim() == 2:
        return features
    _check_tokens("features", features, " or (B, D)")
    if attention is None:
        raise UserError(
            "apply_token_selection needs the model's own attention for (B, 1+N, D) tokens: pass attention=BLOCK, the block "
            "whose input these tokens are, or use tokensieve.apply(model, 'anchor@out(rest=zero)')"
        )
    chosen = _select(features, k, m, alpha, attention, normalize)
    return torch.cat([features[:, :1], chosen.zero_fill(features[:, 1:])], dim=1)


def pruning_plan(
    k_anchors: int = 10, top_m: int = 50, alpha: float = 0.5, prune_layer: int | None = None, rest: str = "drop"
) -> Plan:
    """Pruning in the tower as a plan: by default after half of the blocks."""
    where = None if prune_layer is None else Where("block", (prune_layer,))
    options = {"k": k_anchors, "m": top_m, "alpha": alpha} | ({} if rest == "drop" else {"rest": rest})
    return Plan((make_step(get_method("anchor"), where, None, options),))


def selection_plan(k: int = 10, m: int = 50, alpha: float = 0.5) -> Plan:
    """Token selection at the output of the tower as a plan: tokens that are not selected become zeros."""
    return Plan((make_step(get_method("anchor"), Where("out"), None, {"k": k, "m": m, "alpha": alpha, "rest": "zero"}),))


def apply_pruning_to_model(
    model: nn.Module,
    k_anchors: int = 10,
    top_m: int = 50,
    alpha: float = 0.5,
    prune_layer: int | None = None,
    rest: str = "drop",
) -> Handle:
    """Prunes the model in place: from prune_layer on (default: half the depth) it runs on 1 + k_anchors + top_m tokens."""
    return apply(model, pruning_plan(k_anchors, top_m, alpha, prune_layer, rest))


class PrunedVisionEncoder(nn.Module):
    """The vision tower of a CLIP with pruning. Outside of this module's forward the tower is unchanged.

    The plan is on the tower during forward only, so threads that share a tower wait for each other. With
    `tokensieve.apply` they run at the same time.
    """

    def __init__(
        self,
        model: nn.Module,
        k_anchors: int = 10,
        top_m: int = 50,
        alpha: float = 0.5,
        prune_layer: int | None = None,
        rest: str = "drop",
    ) -> None:
        super().__init__()
        self.visual: Any = getattr(model, "visual", model)
        self.plan = str(pruning_plan(k_anchors, top_m, alpha, prune_layer, rest))
        self._ledger = PerThread()
        apply(self.visual, self.plan).remove()  # raises here if the plan does not fit

    @property
    def ledger(self) -> list[Row]:
        """Patch tokens in and out at each cut, in the last batch of this thread."""
        return list(self._ledger.value or [])

    def forward(self, images: Tensor) -> Any:
        """(B, 3, h, w) -> the output of the stock tower, (B, E) for a CLIP; of a Hugging Face model, its image feature."""
        encode = partial(encode_image, self.visual) if hasattr(self.visual, "base_model_prefix") else self.visual
        with _pruning, Handle(self.visual, Plan.parse(self.plan)) as handle:
            features = encode(images)
            self._ledger.value = handle.ledger
        return features


def _select(tokens: Tensor, k: int, m: int, alpha: float, attention: Attention | nn.Module, normalize: str) -> Reduction:
    _check_options(k=k, m=m, alpha=alpha, normalize=normalize)
    _check_tokens("tokens", tokens)
    n = tokens.shape[1] - 1
    if k + m >= n:
        warnings.warn(f"k+m={k + m} is not below the {n} patches: everything is kept", PlanWarning, stacklevel=3)
    view = View(tokens=tokens[:, 1:], prefix=tokens[:, :1], grid=None, attention=_attention_of(attention, tokens))
    options: dict[str, Any] = {"k": k, "m": m, "alpha": alpha, "normalize": normalize}
    return _anchor.anchor(view, min(k + m, n), **options)


def _check_options(**options: Any) -> None:
    make_step(get_method("anchor"), options=options)


def _check_tokens(name: str, tokens: Any, or_else: str = "") -> None:
    wanted = f"{name} are a tensor of floating point numbers of shape (B, 1+N, D){or_else}"
    if not isinstance(tokens, Tensor):
        raise UserError(f"{wanted}, not {describe_value(tokens)}")
    if not tokens.is_floating_point() or tokens.dim() != 3 or tokens.shape[1] < 2:
        raise UserError(f"{wanted}, not {tokens.dtype} of shape {tuple(tokens.shape)}")


def _attention_of(attention: Attention | nn.Module, tokens: Tensor) -> Attention:
    """The attention of a block or of an nn.MultiheadAttention for these input tokens."""
    if isinstance(attention, Attention):
        return attention
    if isinstance(attention, nn.MultiheadAttention):
        width = tokens.shape[-1]
        offset = attention.in_proj_bias
        both = F.linear(tokens, attention.in_proj_weight[: 2 * width], None if offset is None else offset[: 2 * width])
        q, k = (split_heads(part, attention.num_heads) for part in both.chunk(2, dim=-1))  # (B, H, 1+N, d) each
        return Attention(q, k, prefix=1, scale=q.shape[-1] ** -0.5)
    if hasattr(attention, "attn") and hasattr(attention, "ln_1"):
        return OpenBlock(attention, prefix=1).attention_at(tokens)
    raise UserError(
        f"attention is {describe_value(attention)}; pass a block of the model, an nn.MultiheadAttention or an Attention"
    )
