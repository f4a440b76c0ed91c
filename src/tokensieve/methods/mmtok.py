"""MMTok: the tokens that best cover the question and the whole image, chosen one after the other.

"MMTok: Multimodal Coverage Maximization for Efficient Inference of VLMs", ICLR 2026, arXiv:2508.18264. Written from the
formulas; no licence file of the released code is known to us.

    rows of the text:  softmax over the tokens of cos(text_t, x_j) / 0.02, divided by the number of texts m
    rows of the image: alpha softmax over the tokens of cos(c_i, c_j) / 0.2, divided by N; c: the tokens in CLIP's space
    add the token that most increases the sum over all rows of the largest value among the chosen; alpha = 0.5

Place: on the embeddings that the language model reads (@llm.0), whose text is the question. Where the caller gives tokens in
another space (image_embeds), they make the rows of the image, and those of the text if only they have its width.
The rows of the image are never stored: a few columns at a time are made from the log-sum-exp of each row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.greedy_cover import greedy_cover
from tokensieve.methods.registry import method
from tokensieve.methods.text_space import text_space
from tokensieve.scoring import ROWS_AT_ONCE, cosine, full_precision, gather_rows

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
    unit = F.normalize(image, dim=-1)  # (B, N, E)
    blocks = unit.split(ROWS_AT_ONCE, dim=1)
    sums = torch.cat([(block @ unit.transpose(1, 2) / IMAGE_TEMPERATURE).logsumexp(-1) for block in blocks], dim=1)  # (B, N)

    def columns(some: Tensor) -> Tensor:
        """The rows of the text and of the image at tokens (B, c): (B, M + N, c)."""
        logits = (gather_rows(unit, some) @ unit.transpose(1, 2)).transpose(1, 2) / IMAGE_TEMPERATURE  # (B, N, c)
        patches = (logits - sums[..., None]).exp() * (alpha / view.n)
        return torch.cat([words.gather(2, some[:, None].expand(-1, words.shape[1], -1)), patches], dim=1)

    index, gains = greedy_cover(columns, torch.ones_like(view.tokens[..., 0], dtype=torch.float32), keep)
    return Reduction.keep(index, view.n, scores=gains)


def _text(view: View) -> tuple[Tensor, Tensor]:
    """The texts (B, M, E), and 1 where they are no padding (B, M)."""
    if view.text is not None:
        return view.text.float(), torch.ones(view.text.shape[:2], device=view.text.device)
    space = text_space(view, "mmtok")
    return space.text, space.mask.float()
