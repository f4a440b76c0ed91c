"""Pruner heads inside the language model: a small network at each pruning layer scores the vision tokens for the question.

    v = vision W_v,  w = question W_w                       both to d_internal
    h = v + attention(queries v, keys and values w)         several heads; one learned extra word stands for "none of them"
    logit = MLP(norm(h)) + gain * mean over heads of log(attention to the mean word / attention to "none of them")

logit is (B, N); each layer has its own weights. The last term measures how much a token is related to the question at all,
which the softmax of the attention hides. The MLP also gets the logarithm of the size of a merged token.

In training a token is kept with probability sigmoid((logit + g) / T), where g is the difference of two Gumbel numbers. Nothing
is dropped: the logarithm of the probability is added to the attention logits of that token from this layer on, which is what
dropping changes. (A factor of the hidden state would be undone by the norm of the next layer.) In evaluation the K tokens with
the largest logits are kept and the others dropped. As the probabilities approach 0 and 1, both become the same.

Until then, the K largest of nearly equal probabilities differ from a sample of them. So the training may end with steps on the
hard path (`straight`): K tokens sampled by logit + T * g, with a gate that is 1 in the forward pass and in the backward pass
the logarithm of the token's share, as in methods/learned.py.

The heads read the question only, never the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Question, Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, top

MAX_ODDS = 20.0  # bound of the log odds of one head; without any word they are -infinite


class Head(nn.Module):
    """Logits of keeping each token, from vision tokens (B, N, D) and the words of the question (B, T, D): (B, N)."""

    def __init__(self, width: int, d_internal: int, heads: int, keep_probability: float) -> None:
        super().__init__()
        self.heads = heads
        self.vision_norm, self.question_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.vision, self.question = nn.Linear(width, d_internal), nn.Linear(width, d_internal)
        self.nothing = nn.Parameter(torch.randn(1, 1, d_internal))
        self.q, self.k, self.v, self.o = (nn.Linear(d_internal, d_internal, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(d_internal)
        self.size = nn.Linear(1, d_internal, bias=False)
        self.hidden, self.out = nn.Linear(d_internal, d_internal), nn.Linear(d_internal, 1)
        self.gain = nn.Parameter(torch.tensor(0.1))
        nn.init.normal_(self.out.weight, std=0.1 * d_internal**-0.5)
        nn.init.constant_(
            self.out.bias, math.log(keep_probability / (1 - keep_probability))
        )  # starts with the right number of tokens

    def forward(self, tokens: Tensor, sizes: Tensor, question: Question | None) -> Tensor:
        v = self.vision(self.vision_norm(tokens.float())) + self.size(sizes.log()[..., None])  # (B, N, d_internal)
        nothing = self.nothing.expand(len(v), -1, -1)
        words, mask = nothing, torch.ones_like(nothing[..., 0], dtype=torch.bool)
        if question is not None:
            words = torch.cat([nothing, self.question(self.question_norm(question.tokens.float()))], dim=1)
            mask = torch.cat([mask, question.mask], dim=1)  # (B, 1+T)
        q, k, values = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (self.q(v), self.k(words), self.v(words)))
        logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, H, N, 1+T)
        share = logits.masked_fill(~mask[:, None, None], -1e4).log_softmax(-1)
        attended = (share.exp() @ values).transpose(1, 2).flatten(2)
        n_words = mask.sum(1)[:, None] - 1  # (B, 1)
        odds = (share[..., 1:].logsumexp(-1) - share[..., 0]).clamp(-MAX_ODDS, MAX_ODDS).mean(1) - n_words.clamp_min(
            1
        ).log()  # (B, N)
        logit: Tensor = self.out(F.gelu(self.hidden(self.norm(v + self.o(attended)))))[..., 0] + self.gain * odds
        return logit


class Heads(nn.Module):
    """One Head for each pruning layer.

    Args:
        keep: the number of tokens to keep at each layer.
        arriving: the number of tokens before the first layer.
    """

    temperature: Tensor

    def __init__(
        self,
        width: int,
        layers: Sequence[int] = (0,),
        d_internal: int = 512,
        heads: int = 4,
        keep: Sequence[int] = (),
        arriving: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        if d_internal % heads:
            raise UserError(f"cross: d_internal={d_internal} cannot be divided among {heads} heads")
        if keep and len(keep) != len(layers):
            raise UserError(f"cross: {len(layers)} layers and {len(keep)} counts of tokens; give one count for each layer")
        self.width, self.layers, self.d_internal, self.heads, self.arriving = width, list(layers), d_internal, heads, arriving
        self.keep = list(keep)
        before = [arriving or 2 * keep[0], *keep] if keep else []
        shares = [min(max(after / n, 0.05), 0.95) for n, after in zip(before, keep, strict=False)] or [0.5] * len(layers)
        self.layer = nn.ModuleDict({str(n): Head(width, d_internal, heads, p) for n, p in zip(layers, shares, strict=True)})
        self.register_buffer("temperature", torch.tensor(float(temperature)))
        self.soft = False  # the soft path without noise, in evaluation
        self.straight = False  # in training: the hard path, and a straight-through gate for the gradient

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "width": self.width,
            "layers": self.layers,
            "d_internal": self.d_internal,
            "heads": self.heads,
            "keep": self.keep,
            "arriving": self.arriving,
            "temperature": float(self.temperature),
        }

    def budget(self, place: str) -> int | None:
        """The number of tokens to keep at a layer where the plan has no budget."""
        return dict(zip(self.places(), self.keep, strict=False)).get(place)

    def places(self) -> list[str]:
        return [f"llm.{layer}" for layer in self.layers]

    @full_precision
    def forward(self, view: View) -> Tensor:
        if view.place not in self.places():
            raise UserError(f"cross: no head for @{view.place}; these weights were trained for {', '.join(self.places())}")
        logits: Tensor = self.layer[view.place.removeprefix("llm.")](view.tokens, view.sizes_or_ones(), view.question)
        return logits


@method(
    summary="trained heads in the language model drop the vision tokens that the question does not need (--weights)",
    needs=("question",),
    part=Heads,
    recipe="tokensieve train configs/vision_token_pruning.yaml",
)
def cross(view: View, keep: int) -> Reduction:
    """The tokens with the largest logits; in training all of them, with the probabilities of keeping each."""
    part: Heads = view.part
    logits = part(view)
    if part.training and part.straight:
        noise = part.temperature * view.noise().clamp(1e-6, 1 - 1e-6).logit()
        chosen = top(logits.detach() + noise, keep)
        share = logits.log_softmax(-1).gather(1, chosen)  # (B, K)
        return Reduction.keep(chosen, view.n, scores=logits, gate=1 + (share - share.detach()))
    if not (part.training or part.soft):
        return Reduction.keep(top(logits, keep), view.n, scores=logits)
    noisy = logits + view.noise().clamp(1e-6, 1 - 1e-6).logit() if part.training else logits
    everything = torch.arange(view.n, device=logits.device).expand(len(logits), -1)
    return Reduction(index=everything, n=view.n, scores=logits, soft=(noisy / part.temperature).sigmoid())


def sparsity(soft: Tensor, keep: int) -> Tensor:
    """Mean squared relative error of the expected number of tokens, from the probabilities (B, N)."""
    return ((soft.float().sum(-1) - keep) / keep).square().mean()
