"""Losses of two-stage VLM pruning: the answers, and the numbers of tokens that merger and pruner heads leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.cutting.handle import Handle
from tokensieve.methods import merger
from tokensieve.methods.soft_mask import undecided
from tokensieve.training.pruning.batches import NO_ANSWER


def answer_losses(
    head: Callable[[Tensor], Tensor], pruned: Tensor, labels: Tensor, full: Tensor | None = None
) -> dict[str, Tensor]:
    """The mean over questions of the answer's cross-entropy and, with full, of the divergence from the full model.

    head: hidden states -> logits. pruned, full: last hidden states (B, L, D) of the two models. labels: (B, L).
    """
    answers = labels != NO_ANSWER  # (B, L)
    logits, owner = head(pruned[answers]).float(), answers.nonzero()[:, 0]  # (answer tokens, words), (answer tokens,)
    share = 1.0 / (answers.sum(1)[owner] * len(answers))  # every answer, long or short, has the same weight
    losses = {"task_loss": (F.cross_entropy(logits, labels[answers], reduction="none") * share).sum()}
    if full is not None:
        targets = head(full[answers]).float().log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), targets, reduction="none", log_target=True).sum(-1)
        losses["distill_loss"] = (divergence * share).sum()
    return losses


def count_losses(handle: Handle) -> dict[str, Tensor]:
    """How undecided the scores of the merger and the soft masks of the heads are, in the last pass.

    The masks add up to the target numbers of tokens by construction. `tokens_<place>` is the number that they effectively
    leave, (sum of p)^2 / sum of p^2: the target where every p is 0 or 1, more where they are undecided. On the hard path
    exactly the target is left, so there is no loss.
    """
    losses: dict[str, Tensor] = {}
    present: Any = 1.0  # (B, N), the probability that a token is still there
    masks: list[Tensor] = []
    for position, reduction in (*handle.stages, *handle.soft):
        if reduction.scores is None:  # a cap on the tokens, which is not trained
            continue
        if position == "out":
            losses["merge_sparsity_loss"] = merger.sparsity(reduction.scores, reduction.k)
            continue
        if reduction.soft is None:
            losses[f"tokens_{position}"] = torch.tensor(float(reduction.k))
            continue
        present = present * reduction.soft.float()
        masks.append(undecided(present))
        losses[f"tokens_{position}"] = (present.sum(-1).square() / present.square().sum(-1)).mean()
    if masks:
        losses["mask_sparsity_loss"] = torch.stack(masks).sum()
    return losses
