"""Pruner heads inside the language model: a small network at each pruning layer scores the vision tokens for the question.

    v = vision W_v,  w = question W_w                       both to d_internal
    h = v + attention(queries v, keys and values w)         several heads; one learned extra word stands for "none of them"
    logit = MLP(norm(h)) + gain * mean over heads of log(attention to the mean word / attention to "none of them")

logit is (B, N); each layer has its own weights. The last term measures how much a token is related to the question at all,
which the softmax of the attention hides. The MLP also gets the logarithm of the size of a merged token.

In evaluation the K tokens with the largest logits are kept and the others dropped or merged. With choice="spread" the choice is
by logit and coverage (methods/spread.py), and the logits are standardised (mean 0, deviation 1 over the tokens of an image) and
multiplied by a learned scale that starts small. So untrained heads choose like farthest-point sampling, and what they learn
moves that choice. With choice="top" the K largest of untrained logits are systematically worse than K random tokens.

In training a token is kept with probability sigmoid((logit + g - tau) / T), where g is the difference of two Gumbel numbers and
tau is such that the probabilities add up to K (methods/soft_mask.py). Nothing is dropped: the logarithm of the probability is
added to the attention logits of that token from this layer on, which is what dropping changes. (A factor of the hidden state
would be undone by the norm of the next layer.) With rest=merge the share 1 - p of a token moves to the most similar kept one.
As T goes to 0, this becomes the hard path.

At larger T, masks differ from a choice. So the training may end with steps on the hard path (`straight`): K tokens sampled by
logit + T * g, with a gate that is 1 in the forward pass and in the backward pass the logarithm of the token's share, as in
methods/learned.py.

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
from tokensieve.methods.settings import check_count, check_entries, check_positive
from tokensieve.methods.soft_mask import budgeted
from tokensieve.methods.spread import Choice, StandardisedScores, check_choice, coverage
from tokensieve.scoring import full_precision, top

MAX_ODDS = 20.0  # bound of the log odds of one head; without any word they are -infinite


class Head(nn.Module):
    """Logits of keeping each token, from vision tokens (B, N, D) and the words of the question (B, T, D): (B, N)."""

    def __init__(self, width: int, d_internal: int, heads: int, keep_probability: float, choice: Choice) -> None:
        super().__init__()
        self.heads = heads
        self.vision_norm, self.question_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.vision, self.question = nn.Linear(width, d_internal), nn.Linear(width, d_internal)
        self.nothing = nn.Parameter(torch.randn(1, 1, d_internal))
        self.q, self.k, self.v, self.o = (nn.Linear(d_internal, d_internal, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(d_internal)
        self.size = nn.Linear(1, d_internal, bias=False)
        self.hidden, self.out = nn.Linear(d_internal, d_internal), nn.Linear(d_internal, 1, bias=choice == "top")
        self.gain = nn.Parameter(torch.tensor(0.1))
        self.standardised = StandardisedScores() if choice == "spread" else None
        nn.init.normal_(self.out.weight, std=0.1 * d_internal**-0.5)
        if choice == "top":  # the level of the logits changes no choice, so this is not trained
            nn.init.constant_(self.out.bias, math.log(keep_probability / (1 - keep_probability))).requires_grad_(False)

    def forward(self, tokens: Tensor, sizes: Tensor, question: Question | None, present: Tensor | None) -> Tensor:
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
        return logit if self.standardised is None else self.standardised(logit, present)


class Heads(nn.Module):
    """One Head for each pruning layer.

    Args:
        keep: the number of tokens to keep at each layer.
        arriving: the number of tokens before the first layer.
        choice: "top", the largest logits; "spread", by logit and coverage.
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
        choice: Choice = "top",
    ) -> None:
        super().__init__()
        check_choice("cross", choice)
        for name, value in {"width": width, "d_internal": d_internal, "heads": heads}.items():
            check_count(f"cross: {name}", value)
        for tokens in keep if arriving is None else (arriving, *keep):
            check_count("cross: a number of tokens", tokens)
        for layer in check_entries("cross: layers", layers, int):
            check_count("cross: a layer", layer, least=0)
        check_positive("cross: temperature", temperature)
        if d_internal % heads:
            raise UserError(f"cross: d_internal={d_internal} cannot be divided among {heads} heads")
        if keep and len(keep) != len(layers):
            raise UserError(f"cross: {len(layers)} layers and {len(keep)} counts of tokens; give one count for each layer")
        self.width, self.layers, self.d_internal, self.heads, self.arriving = width, list(layers), d_internal, heads, arriving
        self.keep, self.choice = list(keep), choice
        before = [arriving or 2 * keep[0], *keep] if keep else []
        shares = [min(max(after / n, 0.05), 0.95) for n, after in zip(before, keep, strict=False)] or [0.5] * len(layers)
        self.layer = nn.ModuleDict(
            {str(n): Head(width, d_internal, heads, p, choice) for n, p in zip(layers, shares, strict=True)}
        )
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
            "choice": self.choice,
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
        head = self.layer[view.place.removeprefix("llm.")]
        logits: Tensor = head(view.tokens, view.sizes_or_ones(), view.question, view.present)
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
    is_straight, is_soft = part.training and part.straight, part.soft or (part.training and not part.straight)
    ranked = logits
    if part.training:
        noise = view.noise().clamp(1e-6, 1 - 1e-6).logit()
        ranked = ranked + (part.temperature * noise if is_straight else noise)
    if part.choice == "spread":
        ranked = ranked + coverage(ranked, view.tokens, keep, view.present)
    if is_soft:
        soft = budgeted(ranked, keep, part.temperature, view.present)
        chosen = top(soft.detach() if view.present is None else (soft * view.present).detach(), keep)
        return Reduction(chosen, view.n, scores=logits, soft=soft)
    chosen = top(ranked.detach(), keep)
    if not is_straight:
        return Reduction.keep(chosen, view.n, scores=logits)
    share = logits.log_softmax(-1).gather(1, chosen)  # (B, K)
    return Reduction.keep(chosen, view.n, scores=logits, gate=1 + (share - share.detach()))
