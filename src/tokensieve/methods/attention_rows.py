"""What many published methods rank patches by: the attention of CLS, or where there is none, the attention they receive."""

from __future__ import annotations

from torch import Tensor

from tokensieve.core import View
from tokensieve.scoring import Attention, full_precision


def from_cls(attention: Attention) -> Tensor:
    """(B, N), mean over heads: the attention from CLS to each patch; without CLS what a patch receives, mean over all rows."""
    return attention.cls_row() if attention.prefix and attention.has_cls else attention.received()


def global_attention(view: View) -> Tensor:
    """`from_cls` of the block before the cut."""
    assert view.attention is not None
    return from_cls(view.attention)


@full_precision
def joined_heads(attention: Attention) -> Attention:
    """The same queries and keys as one head of full width C, with the scale 1/sqrt(C); sizes are not counted."""
    q, k = (x.float().transpose(1, 2).flatten(2)[:, None] for x in (attention.q, attention.k))  # (B, 1, P+N, C)
    return Attention(q, k, attention.prefix, k.shape[-1] ** -0.5, has_cls=attention.has_cls)
