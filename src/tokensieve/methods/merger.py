"""A trained scorer selects M centres among the vision tokens; the other tokens are merged into the centres similar to them.

    s = score(X)                                   (B, N), a small MLP on the token and its distance from the mean token
    C = the M tokens with the largest s            in training s + T * Gumbel noise: a sample by the scores, sharper as T falls
    W = softmax over C of q(X) k(C)^T / sqrt(d) / T    (B, N, M); a centre is assigned to itself
    merged_j = sum_i W_ij x_i / sum_i W_ij         means, so that norms do not grow by N / M

With kind="question_aware" the tokens first attend to the embeddings of the question, so scores and assignment depend on it. The
output tokens are means of the original tokens, because a frozen projector reads them.

Top-k has no gradient, so each merged token has a straight-through gate: 1 in the forward pass, and in the backward pass the
logarithm of its centre's share in the softmax of all scores. The gate interpolates between the merged token and the one that
would replace it if its centre were not selected: the one of the most similar centre. As a factor of the token, the gate would
only learn how long a token should be.

The untrained module merges by similarity: q and k start as the same scaled orthogonal projection.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Question, Reduction, View
from tokensieve.errors import UserError, short
from tokensieve.methods.registry import method
from tokensieve.methods.settings import check_count, check_positive
from tokensieve.methods.soft_mask import budgeted, undecided
from tokensieve.methods.spread import Choice, StandardisedScores, check_choice, coverage
from tokensieve.scoring import cosine, full_precision, top

KINDS = ("simple", "question_aware")
HEADS = 4


class Attending(nn.Module):
    """Cross-attention of tokens (B, N, D) to the words of the question (B, T, E), as a residual that starts near 0."""

    def __init__(self, width: int, question_width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.question_norm = nn.LayerNorm(width), nn.LayerNorm(question_width)
        self.ask = nn.Linear(width, inner, bias=False)
        self.key = nn.Linear(question_width, inner, bias=False)
        self.value = nn.Linear(question_width, inner, bias=False)
        self.nothing = nn.Parameter(torch.randn(1, 1, question_width))  # an extra word for tokens unrelated to the question
        self.out = nn.Linear(inner, width, bias=False)
        nn.init.normal_(self.out.weight, std=0.02 * inner**-0.5)

    def forward(self, tokens: Tensor, question: Question) -> Tensor:
        words = torch.cat([self.nothing.expand(tokens.shape[0], -1, -1), self.question_norm(question.tokens.float())], dim=1)
        q = self.ask(self.norm(tokens))
        k, v = self.key(words), self.value(words)
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))  # (B, H, N or 1+T, d)
        mask = F.pad(question.mask, (1, 0), value=True)[:, None, None]  # (B, 1, 1, 1+T)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        change: Tensor = self.out(attended.transpose(1, 2).flatten(2))  # (B, N, D)
        return tokens + tokens.std(-1, keepdim=True) * change


class Merger(nn.Module):
    """The scorer and the assignment. keep: the number of centres; temperature: T of the formulas above."""

    temperature: Tensor

    def __init__(
        self,
        width: int,
        question_width: int | None = None,
        kind: Literal["simple", "question_aware"] = "simple",
        hidden: int = 256,
        keep: int | None = None,
        temperature: float = 1.0,
        choice: Choice = "top",
    ) -> None:
        super().__init__()
        check_choice("merger", choice)
        if kind not in KINDS:
            raise UserError(f"merger: kind={short(kind)!r} is not one of {', '.join(KINDS)}")
        sizes = {"width": width, "question_width": question_width, "hidden": hidden, "keep": keep}
        for name, value in sizes.items():
            if value is not None:
                check_count(f"merger: {name}", value)
        check_positive("merger: temperature", temperature)
        self.width, self.question_width, self.kind, self.hidden, self.keep = width, question_width or width, kind, hidden, keep
        self.choice = choice
        inner = min(width, hidden)
        if kind == "question_aware" and inner % HEADS:
            raise UserError(f"merger: hidden={hidden} (of width {width}) cannot be divided among {HEADS} heads")
        self.attending = Attending(width, self.question_width, inner) if kind == "question_aware" else None
        self.norm = nn.LayerNorm(width)
        self.token = nn.Linear(width, hidden)
        self.cue = nn.Linear(1, hidden, bias=False)
        self.out = nn.Linear(hidden, 1, bias=choice == "top")
        self.standardised = StandardisedScores() if choice == "spread" else None
        self.novelty = nn.Parameter(
            torch.ones(())
        )  # weight of the distance itself: at first, the most distant tokens are selected
        self.q, self.k = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.register_buffer("temperature", torch.tensor(float(temperature)))
        self.soft = False  # the soft path of the pruner heads; a merge is the same on both
        nn.init.normal_(self.out.weight, std=0.1 * hidden**-0.5)
        if choice == "top":  # the level of the scores changes no choice, so this is not trained
            nn.init.zeros_(self.out.bias).requires_grad_(False)
        nn.init.orthogonal_(self.q.weight, gain=SHARPNESS**0.5 * inner**-0.25 * (inner / width) ** -0.5)
        with torch.no_grad():
            self.k.weight.copy_(self.q.weight)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "width": self.width,
            "question_width": self.question_width,
            "kind": self.kind,
            "hidden": self.hidden,
            "keep": self.keep,
            "temperature": float(self.temperature),
            "choice": self.choice,
        }

    def budget(self, place: str) -> int | None:
        """The number of tokens to keep where the plan has no budget."""
        return self.keep

    def places(self) -> list[str]:
        return ["out"]

    @full_precision
    def forward(self, view: View) -> tuple[Tensor, Tensor]:
        """The scores (B, N) and the tokens (B, N, D) as the assignment compares them."""
        tokens = view.tokens.float()
        if self.attending is not None:
            if view.question is None:
                raise UserError(
                    "merger: kind=question_aware needs a question, and this model gets none; train one with merger_type: simple"
                )
            tokens = self.attending(tokens, view.question)
        mean = tokens.mean(1, keepdim=True)  # (B, 1, D)
        away = 1 - cosine(tokens, mean)  # (B, N, 1)
        away = (away - away.mean(1, keepdim=True)) / away.std(1, keepdim=True).clamp_min(1e-6)
        normed = self.norm(tokens)
        scores = self.out(F.gelu(self.token(normed) + self.cue(away))) + self.novelty * away
        scores = scores[..., 0] if self.standardised is None else self.standardised(scores[..., 0])
        return scores, normed - normed.mean(1, keepdim=True)

    @full_precision
    def assign(self, tokens: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
        """W (B, N, M), whose rows add up to 1, and for each centre the index of the most similar other centre (B, M)."""
        m = centres.shape[1]
        at = centres[..., None]  # (B, M, 1)
        logits = self.q(tokens) @ self.k(tokens.gather(1, at.expand(-1, -1, tokens.shape[2]))).transpose(1, 2)  # (B, N, M)
        logits = logits / math.sqrt(self.q.out_features) / self.temperature
        itself = torch.eye(m, device=tokens.device).expand(len(tokens), -1, -1)
        share = logits.softmax(-1).scatter(1, at.expand(-1, -1, m), itself)
        others = logits.gather(1, at.expand(-1, -1, m)).masked_fill(itself.bool(), -torch.inf)  # (B, M, M)
        return share, others.argmax(-1)


SHARPNESS = 50.0  # what the cosine of two tokens is multiplied with in W's logits, at the start and at T = 1


@method(
    summary="a trained scorer selects centres and merges the other tokens into them (--weights)",
    needs=("question",),
    selects=False,
    part=Merger,
    recipe="tokensieve train configs/vision_token_pruning.yaml",
)
def merger(view: View, keep: int) -> Reduction:
    """Weighted means of the tokens around the centres that the trained Merger selects."""
    part: Merger = view.part
    scores, compared = part(view)
    learning = part.training and torch.is_grad_enabled()
    ranked = scores.detach()
    if part.training:
        ranked = ranked - part.temperature * (-view.noise().clamp(1e-6, 1 - 1e-6).log()).log()
    if part.choice == "spread":
        ranked = ranked + coverage(ranked, view.tokens, keep)
    centres = top(ranked, keep)  # (B, M)
    share, nearest = part.assign(compared, centres)
    mass = share.transpose(1, 2) * view.sizes_or_ones()[:, None]  # (B, M, N)
    sizes = mass.sum(-1)  # (B, M)
    weight = mass / sizes[..., None]
    if learning and keep > 1:
        chosen = scores.log_softmax(-1).gather(1, centres)
        gate = (chosen - chosen.detach())[..., None]  # (B, M, 1), 0 forward
        weight = weight + gate * (weight - weight.gather(1, nearest[..., None].expand_as(weight))).detach()
    return Reduction(index=centres, n=view.n, weight=weight, sizes=sizes, scores=scores)


def sparsity(scores: Tensor, keep: int) -> Tensor:
    """How undecided the scores (B, N) are about their `keep` centres: falls to 0 as these move away from the others.

    The loss is on the scores because the number of centres is fixed and has no gradient.
    """
    return undecided(budgeted(scores.float(), keep, 1.0))
