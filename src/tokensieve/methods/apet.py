"""ApET: the tokens that a few others approximate worst are kept; no attention is needed.

"ApET: Approximation-Error Guided Token Compression", CVPR 2026, arXiv:2602.19870. Written from its rule; the released code is
MIT.

    basis = k tokens by farthest-point sampling          Euclid, the first is the token farthest from the mean
    x^_i = the ridge regression of token i on the basis  (B B^T + 1e-5 I)^-1
    e_i = ||x_i - x^_i||                                 the keep largest errors are chosen; the last k of them, by error, are
                                                         replaced by the basis tokens
    the other chosen tokens absorb every token that was not chosen and is most similar to them: mean with count

Place: at the tower's output, before the projector; a second cut in the language model is that of VScan (`fastv@llm.16`). The
budget counts patches. k is a quarter of the budget here: the paper tunes it. A token is never taken twice: basis tokens have
errors near 0, and those that are also among the largest errors count once. The extra places go to the next errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.farthest_points import farthest_points
from tokensieve.methods.joining import join_most_similar
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision, gather_rows

RIDGE = 1e-5
NO_CLIP = float("inf")


@method(
    summary="tokens that a few basis tokens approximate worst, and the basis; the rest merged into the former",
    paper='"ApET: Approximation-Error Guided Token Compression", CVPR, 2026, arXiv:2602.19870',
    selects=False,
    budget=lambda options: "25%",
    where="out",
    no_onnx="it solves systems of linear equations, for which ONNX has no operator",
)
@full_precision
def apet(view: View, keep: int, *, basis: float = 0.25) -> Reduction:
    """The largest errors and the basis, `keep` in all."""
    x = view.tokens.float()
    k = min(keep, max(1, int(keep * basis)))
    chosen, _ = farthest_points(x, k, NO_CLIP)  # (B, k)
    errors = approximation_error(x, gather_rows(x, chosen))  # (B, N)
    ranking = errors.scatter(1, chosen, -torch.inf)  # a basis token has a place already
    worst = ranking.sort(dim=1, descending=True, stable=True).indices[:, : keep - k]  # (B, keep - k)
    index = torch.cat([worst, chosen], dim=1).sort(1).values
    is_basis = torch.zeros_like(errors, dtype=torch.bool).scatter(1, chosen, True)
    groups = join_most_similar(x, index) if keep == k else _absorb(x, index, worst, is_basis)
    ones = torch.ones_like(errors)
    merged = Reduction.merge(groups, index, ones, errors)
    merged.sizes = None  # a token is one token for later attention
    return merged


def approximation_error(x: Tensor, basis: Tensor) -> Tensor:
    """The distance of each token (B, N, D) from its ridge regression on the basis (B, k, D): (B, N)."""
    gram = basis @ basis.transpose(1, 2)  # (B, k, k)
    gram = gram + RIDGE * torch.eye(gram.shape[1], device=x.device)
    weights = torch.linalg.solve(gram, basis @ x.transpose(1, 2))  # (B, k, N)
    errors: Tensor = (x - weights.transpose(1, 2) @ basis).norm(dim=-1)
    return errors


def _absorb(x: Tensor, index: Tensor, worst: Tensor, is_basis: Tensor) -> Tensor:
    """Groups (B, N): basis tokens stay alone, all others join the most similar of the worst."""
    worst = worst.sort(1).values
    to_worst = join_most_similar(x, worst)  # (B, N), numbers among the worst
    number = torch.searchsorted(index, worst)  # (B, keep - k), where they are among all outputs
    groups = number.gather(1, to_worst)
    own = torch.searchsorted(index, torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1).contiguous())
    return torch.where(is_basis, own, groups)
