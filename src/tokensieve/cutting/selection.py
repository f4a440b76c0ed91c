"""Selection and pruning under the names that users of the CLIP benchmark know (S1, S2).

tokens are (B, 1 + N, D) with CLS first; indices count patches, so CLS has none. attention is the model's own: the block
whose *input* the tokens are (an open_clip block, or an nn.MultiheadAttention), or a scoring.Attention, which may have been
taken at the input of the block that gave the tokens: then this is what the plan anchor@L does.
To select inside a model, `tokensieve.apply(model, "anchor@6(k=10,m=50)")` is simpler.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.cutting.handle import Handle, apply
from tokensieve.cutting.passes import Row
from tokensieve.errors import PlanWarning, UserError
from tokensieve.methods import anchor as _anchor
from tokensieve.methods.registry import get_method
from tokensieve.models.features import encode_image
from tokensieve.plan import Plan, Where, make_step
from tokensieve.scoring import Attention, top


def select_anchor_tokens(tokens: Tensor, k: int = 10, *, attention: Attention | nn.Module) -> Tensor:
    """The k patches that CLS attends to most: (B, 1+N, D) -> (B, k) in raster order."""
    _check(k=k)
    return top(_resolve(attention, tokens).cls_row(), min(k, tokens.shape[1] - 1))


def compute_importance_scores(tokens: Tensor, anchors: Tensor, *, attention: Attention | nn.Module) -> Tensor:
    """I: mean attention of each patch to the anchors, as in the whole softmax: (B, N)."""
    return _anchor.importance(_resolve(attention, tokens), anchors)


def compute_diversity_scores(tokens: Tensor, anchors: Tensor) -> Tensor:
    """D: one minus the cosine to the most similar anchor: (B, N)."""
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
    """CLS, the anchors and the m best others stay in place, every other position is 0; the length stays.

    A pooled input (B, D) is returned as it is.
    """
    _check(k=k, m=m, alpha=alpha, normalize=normalize)
    if features.dim() == 2:
        return features
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
    """S2's flags as a plan; without prune_layer after half the depth."""
    where = None if prune_layer is None else Where("block", (prune_layer,))
    given = {"k": k_anchors, "m": top_m, "alpha": alpha} | ({} if rest == "drop" else {"rest": rest})
    return Plan((make_step(get_method("anchor"), where, None, given),))


def selection_plan(k: int = 10, m: int = 50, alpha: float = 0.5) -> Plan:
    """S1's flags as a plan: at the tower's output, zeros where nothing was selected."""
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
    """A CLIP's vision tower that prunes; the tower itself stays as it was outside of this module's forward."""

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
        self.ledger: list[Row] = []  # of the last batch
        apply(self.visual, self.plan).remove()  # whether it fits is said now

    def forward(self, images: Tensor) -> Any:
        """(B, 3, h, w) -> whatever the stock tower gives, (B, E) for a CLIP; a Hugging Face model's image feature."""
        encode = partial(encode_image, self.visual) if hasattr(self.visual, "base_model_prefix") else self.visual
        with Handle(self.visual, Plan.parse(self.plan)) as handle:
            features = encode(images)
        self.ledger = handle.ledger
        return features


def _select(tokens: Tensor, k: int, m: int, alpha: float, attention: Attention | nn.Module, normalize: str) -> Reduction:
    _check(k=k, m=m, alpha=alpha, normalize=normalize)
    n = tokens.shape[1] - 1
    if k + m >= n:
        warnings.warn(f"k+m={k + m} is not below the {n} patches: everything is kept", PlanWarning, stacklevel=3)
    view = View(tokens=tokens[:, 1:], prefix=tokens[:, :1], grid=None, attention=_resolve(attention, tokens))
    options: dict[str, Any] = {"k": k, "m": m, "alpha": alpha, "normalize": normalize}
    return _anchor.anchor(view, min(k + m, n), **options)


def _check(**given: Any) -> None:
    normalize = get_method("anchor").options["normalize"]
    normalize.read(given.get("normalize", normalize.default), "normalize", "anchor")
    _anchor.check({"k": 10, "m": 50, "alpha": 0.5} | given)


def _resolve(attention: Attention | nn.Module, tokens: Tensor) -> Attention:
    if isinstance(attention, Attention):
        return attention
    if isinstance(attention, nn.MultiheadAttention):
        width = tokens.shape[-1]
        offset = attention.in_proj_bias
        both = F.linear(tokens, attention.in_proj_weight[: 2 * width], None if offset is None else offset[: 2 * width])
        q, k = both.unflatten(2, (2, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, 1+N, d) each
        return Attention(q, k, prefix=1, scale=q.shape[-1] ** -0.5)
    if hasattr(attention, "attn") and hasattr(attention, "ln_1"):
        from tokensieve.models.open_clip import OpenBlock

        return OpenBlock(attention, prefix=1).attention_at(tokens)
    raise UserError(
        f"attention is a {type(attention).__name__}; pass a block of the model, an nn.MultiheadAttention or an Attention"
    )
