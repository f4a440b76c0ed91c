"""LAPS: patches that are like the mean patch and the mean word are kept; the others become one token.

Fu et al., "Linguistic-Aware Patch Slimming Framework for Fine-grained Cross-Modal Alignment", CVPR 2024. Written from the
formulas; the released code has no licence.

    s_i = cos(mean patch, v_i) + cos(mean word, v_i)        for each pair of image and caption; neither is learned
    keep the ceil(ratio L) largest; extra token = sum of the others by softmax(s)

Place: at the tower's output, ratio 0.5. The authors then train an aggregation of the kept tokens and compare words with
patches; here it is the selection and the extra token, without training. The words are the question of a language model, or the
embeddings that the caller gives (context={"text": ...}) with the tokens in their space. Without any text, the first term alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.joining import with_mean_of_rest
from tokensieve.methods.registry import method
from tokensieve.methods.text_space import text_space
from tokensieve.scoring import full_precision, top


@method(
    summary="patches like the mean patch and the mean word; the others become one token",
    paper='Fu et al., "Linguistic-Aware Patch Slimming Framework for Fine-grained Cross-Modal Alignment", CVPR, 2024',
    needs=("text",),
    selects=False,
    budget=lambda options: "50%",
    where=lambda depth, decoder: "llm.0" if decoder else "out",
    extra=1,
)
@full_precision
def laps(view: View, keep: int) -> Reduction:
    """The largest scores, and one token for the others."""
    x = view.tokens.float()
    scores = _cosine_to(x, x.mean(1))
    if view.text is not None or view.question is not None:
        space = text_space(view, "laps")
        scores = scores + _cosine_to(space.image, space.mean_text())
    index = top(scores, keep)
    return with_mean_of_rest(index, scores.scatter(1, index, -torch.inf).softmax(-1), scores)


def _cosine_to(x: Tensor, one: Tensor) -> Tensor:
    """Cosines of tokens (B, N, D) to one vector (B, D): (B, N)."""
    return F.cosine_similarity(x, one[:, None], dim=-1)
