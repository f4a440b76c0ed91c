"""PruneSID: tokens in groups of one principal direction each; in every group the attended ones that are not alike are kept.

Fang et al., "Prune Redundancy, Preserve Essence: Vision Token Compression in VLMs via Synergistic Importance-Diversity"
(PruneSID), ICLR 2026, arXiv:2603.09480. Written from its rule; the released code has no licence.

    groups: principal components of sigmoid(h)^T, G = int(T / 4) of them; a token belongs to argmax |loading|
    in each group, by falling CLS attention (sum over heads): take the best, suppress those with a cosine above thr to it
    thr = (T / 32) x the mean cosine between different tokens of the image
    survivors of a group: the tokens that were not suppressed
    cap = min(5 ceil(T / 64), survivors), all raised by one, within the size of the group, until their sum is T or more
    quota: 1 for each group that is not empty, the rest in proportion to the survivors (rounded sums, group by group), at most
           the cap; what is left goes to the groups with most survivors, each up to its cap
    in a group: survivors first, then others by attention

Place: at the tower's output, on the states of the last block but one. T counts the CLS token as the authors do, so T - 1
patches come out. The components are exact here; the released code finds them by a random method.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.methods.registry import method
from tokensieve.scoring import full_precision


@method(
    summary="attended tokens that are not alike, from groups of one principal direction each",
    paper='Fang et al., "Prune Redundancy, Preserve Essence" (PruneSID), ICLR, 2026, arXiv:2603.09480',
    needs=("attention",),
    budget=lambda options: "64",
    where="out",
    no_graph="it goes through the groups in loops that depend on values",
    extra=-1,
    min_keep=lambda n: min(n, 2),
)
@full_precision
def prunesid(view: View, keep: int) -> Reduction:
    """keep - 1 patches: the authors count CLS."""
    assert view.attention is not None
    attention = view.attention
    has_row = attention.has_cls and attention.prefix
    scores = (attention.cls_heads().sum(1) if has_row else attention.received()).float()  # (B, N)
    x = view.tokens.float()
    groups = principal_groups(x, max(1, keep // 4))
    picked = [_choose(x[b], scores[b], groups[b], keep) for b in range(len(x))]
    return Reduction.keep(torch.stack(picked), view.n, scores=scores)


def principal_groups(x: Tensor, count: int) -> Tensor:
    """For each token (B, N, D) the principal component on which it loads most: (B, N)."""
    features = torch.sigmoid(x).transpose(1, 2)  # (B, D, N): channels are samples, tokens are variables
    centred = features - features.mean(1, keepdim=True)
    _, _, loadings = torch.linalg.svd(centred, full_matrices=False)  # (B, R, N)
    groups: Tensor = loadings[:, :count].abs().argmax(1)
    return groups


def _choose(x: Tensor, scores: Tensor, groups: Tensor, total: int) -> Tensor:
    """The choice for one image, (total - 1,)."""
    n, wanted = len(x), min(len(x), total - 1)
    unit = F.normalize(x, dim=-1)
    similar = unit @ unit.T  # (N, N)
    mean = (similar.sum() - similar.diagonal().sum()) / max(1, n * (n - 1))
    threshold, order = float(total / 32 * mean), scores.sort(descending=True, stable=True).indices.tolist()
    members: dict[int, list[int]] = {}
    for token in order:  # by falling attention
        members.setdefault(int(groups[token]), []).append(token)
    ranked, survivors = [], []
    for group in sorted(members):  # by component
        best: list[int] = []
        for token in members[group]:
            if all(float(similar[token, other]) <= threshold for other in best):
                best.append(token)
        ranked.append(best + [token for token in members[group] if token not in best])
        survivors.append(len(best))
    quotas = _quotas(survivors, [len(tokens) for tokens in ranked], total, wanted)
    chosen = [token for tokens, quota in zip(ranked, quotas, strict=True) for token in tokens[:quota]]
    return torch.tensor(chosen, device=x.device)


def _quotas(survivors: list[int], sizes: list[int], total: int, wanted: int) -> list[int]:
    """How many tokens each group gives, `wanted` in all."""
    caps = [min(5 * -(-total // 64), count) for count in survivors]
    while sum(caps) < min(total, sum(sizes)):
        caps = [min(cap + 1, size) for cap, size in zip(caps, sizes, strict=True)]
    spare, mass = max(0, wanted - len(sizes)), sum(survivors)
    shares = [round(spare * sum(survivors[: number + 1]) / mass) for number in range(len(survivors))]  # half to even
    more = [after - before for before, after in itertools.pairwise([0, *shares])]
    quotas = [min(1 + extra, cap) for extra, cap in zip(more, caps, strict=True)]
    for group in sorted(range(len(sizes)), key=lambda group: -survivors[group]):
        quotas[group] += min(caps[group] - quotas[group], wanted - sum(quotas))
    return quotas
