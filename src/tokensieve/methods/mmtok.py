"""MMTok: the tokens that best cover the question and the whole image, chosen one after the other.

"MMTok: Multimodal Coverage Maximization for Efficient Inference of VLMs", ICLR 2026, arXiv:2508.18264. Written from the
formulas.

    rows of the text:  softmax over the tokens of cos(text_t, x_j) / 0.02, divided by the number of texts m
    rows of the image: alpha softmax over the tokens of cos(c_i, c_j) / 0.2, divided by N; c: the tokens in CLIP's space
    add the token that most increases the sum over all rows of the largest value among the chosen; alpha = 0.5

Place: on the embeddings that the language model reads (@llm.0), whose text is the question. Where the caller gives tokens in
another space (image_embeds), they make the rows of the image, and those of the text if only they have its width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.greedy_cover import greedy_cover
from tokensieve.methods.registry import method
from tokensieve.methods.text_space import text_space
from tokensieve.scoring import cosine, full_precision

TEXT_TEMPERATURE, IMAGE_TEMPERATURE = 0.02, 0.2


@method(
    summary="tokens that best cover the question and the image, one after the other",
    paper='"MMTok: Multimodal Coverage Maximization for Efficient Inference of VLMs", ICLR, 2026, arXiv:2508.18264',
    needs=("text",),
    budget=lambda options: "64",
    where=lambda depth, decoder: "llm.0" if decoder else "out",
)
@full_precision
def mmtok(view: View, keep: int, *, alpha: float = 0.5) -> Reduction:
    """Greedy coverage of the rows of the text and of the image."""
    texts, mask = _text(view)
    image = (view.tokens if view.image_embeds is None else view.image_embeds).float()
    tokens = view.tokens.float() if texts.shape[2] == view.tokens.shape[2] else image
    words = (cosine(texts, tokens) / TEXT_TEMPERATURE).softmax(-1)  # (B, M, N)
    words = words * (mask / mask.sum(1, keepdim=True).clamp_min(1))[..., None]
    patches = (cosine(image, image) / IMAGE_TEMPERATURE).softmax(-1) * (alpha / view.n)  # (B, N, N)
    rows = torch.cat([words, patches], dim=1)  # (B, M + N, N)

    def columns(some: Tensor) -> Tensor:
        return rows.gather(2, some[:, None].expand(-1, rows.shape[1], -1))

    index, gains = greedy_cover(columns, torch.ones_like(rows[:, 0]), keep)
    return Reduction.keep(index, view.n, scores=gains)


def _text(view: View) -> tuple[Tensor, Tensor]:
    """The texts (B, M, E), and 1 where they are no padding (B, M)."""
    if view.text is not None:
        return view.text.float(), torch.ones(view.text.shape[:2], device=view.text.device)
    space = text_space(view, "mmtok")
    return space.text, space.mask.float()
