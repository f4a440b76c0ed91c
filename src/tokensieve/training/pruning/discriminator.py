"""A discriminator between hidden states of the full model (real) and of the pruned one (fake), at the words of the text.

The states of vision tokens are not compared: the pruned model has fewer of them. Every word's state is normalised and read by a
small MLP; an attention over the words pools them into one logit for each question.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.scoring import full_precision


class Discriminator(nn.Module):
    """States (B, L, D) and which of them are words (B, L) -> the logit of being the full model's (B,)."""

    def __init__(self, width: int, hidden: int = 256) -> None:
        super().__init__()
        self.read = nn.Linear(width, hidden)
        self.weigh = nn.Linear(hidden, 1, bias=False)  # a bias would be the same for all words
        self.hidden = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    @full_precision
    def forward(self, states: Tensor, words: Tensor) -> Tensor:
        states = states.float().masked_fill(~words[..., None], 0.0)
        features = F.gelu(self.read(F.layer_norm(states, states.shape[-1:])))  # (B, L, hidden)
        weights = self.weigh(features)[..., 0].masked_fill(~words, -torch.inf).softmax(-1)  # (B, L)
        pooled = (weights[:, None] @ features)[:, 0]  # (B, hidden)
        return self.out(F.gelu(self.hidden(pooled)))[..., 0]

    def reset_parameters(self, seed: int) -> None:
        """New random weights from this seed, without a change of the global generators."""
        device = next(self.parameters()).device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = Discriminator(self.read.in_features, self.read.out_features)
        self.load_state_dict({name: value.to(device) for name, value in fresh.state_dict().items()})


def critic_loss(logits: Tensor, real: bool) -> Tensor:
    """The cross-entropy of classifying these as real, or as fake."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))
