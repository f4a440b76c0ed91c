"""The words that rate vision tokens in SparseVLM: those behind the image that the image is most like.

m = mean over vision tokens of softmax over the words of H_v H_t^T     input embeddings, no scale
raters: the words with m above the mean of m
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.core import Inputs, View


def find_raters(view: View) -> Tensor:
    """1 for the words behind the image that rate the vision tokens, (B, T); for all of them where none is relevant."""
    assert view.attention is not None and view.inputs is not None
    text = view.attention.question_rows()
    can_see = text.mask & text.follows
    raters = relevant_words(view.inputs, can_see)
    return torch.where(raters.any(1, keepdim=True), raters, can_see).float()


def relevant_words(inputs: Inputs, mask: Tensor) -> Tensor:
    """Of the words in the mask (B, T), those that the vision tokens are most like on input embeddings: (B, T), bool."""
    products = inputs.tokens.float() @ inputs.question.tokens.float().transpose(1, 2)  # (B, N, T)
    relevance = products.masked_fill(~mask[:, None], -torch.inf).softmax(-1).mean(1)  # (B, T)
    mean = relevance.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
    return (relevance > mean) & mask
