"""Losses of two-stage VLM pruning: the answers, and the numbers of tokens that merger and pruner heads leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.cutting.handle import Handle
from tokensieve.methods import cross, merger
from tokensieve.training.pruning.batches import NO_ANSWER


def answer_losses(
    head: Callable[[Tensor], Tensor], full: Tensor, pruned: Tensor, labels: Tensor, distill: bool
) -> dict[str, Tensor]:
    """The mean over questions of the answer's cross-entropy and, with distill, of the divergence from the full model.

    head: hidden states -> logits. full, pruned: last hidden states (B, L, D) of the two models. labels: (B, L).
    """
    answers = labels != NO_ANSWER  # (B, L)
    logits, owner = head(pruned[answers]).float(), answers.nonzero()[:, 0]  # (answer tokens, words), (answer tokens,)
    share = 1.0 / (answers.sum(1)[owner] * len(answers))  # every answer, long or short, has the same weight
    losses = {"task_loss": (F.cross_entropy(logits, labels[answers], reduction="none") * share).sum()}
    if distill:
        targets = head(full[answers]).float().log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), targets, reduction="none", log_target=True).sum(-1)
        losses["distill_loss"] = (divergence * share).sum()
    return losses


def count_losses(handle: Handle, heads: Any) -> dict[str, Tensor]:
    """The distance of merger and heads from their target numbers of tokens, and the numbers themselves, in the last pass."""
    losses: dict[str, Tensor] = {}
    kept: Any = 1.0  # (B, N), the probability that a token is still there
    distances: list[Tensor] = []
    for position, reduction in (*handle.stages, *handle.soft):
        if reduction.scores is None:  # a cap on the tokens, which is not trained
            continue
        if position == "out":
            losses["merge_sparsity_loss"] = merger.sparsity(reduction.scores, reduction.k)
            continue
        kept_here = (reduction.scores / heads.temperature).sigmoid() if reduction.soft is None else reduction.soft
        kept = kept_here if reduction.soft is None else kept * kept_here  # hard: tokens dropped before are not in the scores
        distances.append(cross.sparsity(kept, reduction.k if reduction.soft is None else heads.budget(position)))
        losses[f"tokens_{position}"] = kept.sum(-1).mean()
    if distances:
        losses["mask_sparsity_loss"] = torch.stack(distances).sum()
    return losses
