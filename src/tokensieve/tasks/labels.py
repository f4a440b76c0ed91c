"""What classification and linear probe say of a sample: its label, and the classes that come nearest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokensieve.tasks.base import Prediction

NEAREST = 5  # classes that are named for a sample


def top_shares(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest classes of logits (n,C), and their softmax over all classes: (n,k), (n,k)."""
    nearest = logits.topk(min(NEAREST, logits.shape[1]), dim=1).indices
    return nearest, logits.softmax(dim=1).gather(1, nearest)


def label_predictions(
    nearest: Tensor, shares: Tensor, targets: Tensor, samples: Tensor, classes: Sequence[str]
) -> list[Prediction]:
    """nearest, shares (n,k) of `top_shares`; targets (n,), or (n,C) with several labels a sample; samples (n,), their numbers.

    Classes without a name are called by their number.
    """

    def name(number: int) -> str | int:
        return classes[number] if number < len(classes) else number

    made: list[Prediction] = []
    rows = zip(samples.tolist(), targets.tolist(), nearest.tolist(), shares.tolist(), strict=True)
    for sample, target, best, share in rows:
        several = isinstance(target, list)
        right = [number for number, has in enumerate(target) if has] if several else [target]
        labels = [name(number) for number in right]
        made.append(
            {
                "sample": sample,
                "label": labels if several else labels[0],
                "prediction": name(best[0]),
                "score": share[0],
                "correct": best[0] in right,
                "nearest": [[name(number), score] for number, score in zip(best, share, strict=True)],
            }
        )
    return made
