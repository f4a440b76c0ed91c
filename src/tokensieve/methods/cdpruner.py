"""CDPruner: tokens that are relevant to the question and differ from each other, by a determinantal point process.

Zhang et al., "Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs", NeurIPS 2025,
arXiv:2506.10967. Written from the formulas; the released code is Apache-2.0.

    relevance: x_i = mean over the texts of -cos(e_i, t_m), r_i = (x_i - min + 1e-6) / (max - min)      note the minus
    kernel r_i cos(f_i, f_j) r_j;  greedy MAP of T tokens (Chen et al., 2018)

f: the tokens as the language model reads them; e: the tokens in the space of the text. Place: before the language model
(@llm.0). The caller gives CLIP's embeddings of the question and of the patches (context={"text": ..., "image_embeds": ...});
without them the question and the tokens are compared as the language model reads them, with a plus, as OpenVINO does. Minimum
and maximum are of the image, not of the batch. If the kernel has a lower rank than T, the rest is chosen by what is left of it,
then by position; the released code fails there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.methods.text_space import text_space
from tokensieve.scoring import cosine, full_precision

SMALLEST = 1e-6  # relevance of the least relevant token
EXHAUSTED = 1e-5  # the share of a token below which the chosen ones explain it: it is rounding error


@method(
    summary="tokens relevant to the question and unlike each other, by a determinantal point process",
    paper='Zhang et al., "Beyond Attention or Similarity", NeurIPS, 2025, arXiv:2506.10967',
    needs=("text",),
    budget=lambda options: "64",
    where=lambda depth, decoder: "llm.0" if decoder else "out",
)
@full_precision
def cdpruner(view: View, keep: int) -> Reduction:
    """Greedy choice of the most likely set."""
    space = text_space(view, "cdpruner")
    sign = -1.0 if space.is_clip else 1.0
    similar = sign * cosine(space.image, space.text)  # (B, N, M)
    there = space.mask[:, None].float()
    relevance = (similar * there).sum(-1) / there.sum(-1).clamp_min(1)
    low, high = relevance.amin(1, keepdim=True), relevance.amax(1, keepdim=True)
    relevance = (relevance - low + SMALLEST) / (high - low).clamp_min(SMALLEST)
    index = most_likely_set(F.normalize(view.tokens.float(), dim=-1) * relevance[..., None], keep)
    return Reduction.keep(index, view.n, scores=relevance)


def most_likely_set(features: Tensor, keep: int) -> Tensor:
    """The greedy choice for the kernel of features (B, N, D), in its order: (B, keep). The kernel is never stored."""
    batch, n = features.shape[:2]
    image = torch.arange(batch, device=features.device)
    square = features.square().sum(-1)  # (B, N)
    left = square  # (B, N), what the chosen tokens do not explain
    rows = features.new_zeros((batch, keep, n))
    chosen: list[Tensor] = []
    for number in range(keep):
        at = left.argmax(1)  # (B,)
        chosen.append(at)
        kernel = (features[image, at][:, None] @ features.transpose(1, 2))[:, 0]  # (B, N); the other way round is slower
        explained = (rows[image, :number, at][:, None] @ rows[:, :number])[:, 0] if number else torch.zeros_like(kernel)
        rest = left[image, at][:, None]
        new = (kernel - explained) / rest.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
        rows[:, number] = torch.where(rest > 0, new, 0.0)
        left = left - rows[:, number].square()
        left = torch.where(left > EXHAUSTED * square, left, 0.0).scatter(1, torch.stack(chosen, 1), -torch.inf)
    return torch.stack(chosen, dim=1)
