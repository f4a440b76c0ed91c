"""Questions to be answered by yes or no, as POPE scores them: accuracy, precision, recall and F1 of "yes", share of "yes".

Of an answer only its first sentence counts. It is "no" if it has the word no or not, else "yes". `f1` is that of all questions;
`f1_mean` is the mean over the kinds (POPE's random, popular, adversarial), which many papers report.

All metrics are ratios of sums over questions. Their standard errors are those of the linearised ratio (delta method): the value
of a question is R + (numerator - R denominator) / mean denominator. The mean of these values is the ratio R itself, so that
paired differences of plans have a standard error too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokensieve.tasks.base import SampleScores
from tokensieve.tasks.vqa.answering import SHORT
from tokensieve.tasks.vqa.scoring import Reference, Scores, Scoring, means_and_errors, number_names, rows_by_kind


def says_yes(answer: str) -> bool:
    """Whether an answer counts as yes.

    >>> says_yes("Yes, there is."), says_yes("No."), says_yes("There is not a dog. Yes")
    (True, False, False)
    """
    return not {"no", "not"} & set(_words(answer))


def _words(answer: str) -> list[str]:
    return re.findall(r"[\w']+", answer.split(".")[0].lower())


class Decided(NamedTuple):
    """What is kept of a batch, for each question."""

    answers: list[bool]
    labels: list[bool]
    matched: list[bool]  # the answer has the word yes, no or not
    kinds: list[str]
    files: list[str]


class YesNo(Scoring):
    metric = "f1"
    prompt = SHORT

    def record(self, answers: Sequence[str], references: Sequence[Reference]) -> Decided:
        return Decided(
            [says_yes(answer) for answer in answers],
            [reference.answers[0] == "yes" for reference in references],
            [bool({"yes", "no", "not"} & set(_words(answer))) for answer in answers],
            [reference.kind for reference in references],
            [reference.file for reference in references],
        )

    def judge(self, answer: str, reference: Reference) -> tuple[str, float]:
        said = "yes" if says_yes(answer) else "no"
        return said, float(said == reference.answers[0])

    def metrics(self, records: Sequence[Decided]) -> dict[str, float]:
        yes, label, images = _tensors(records)
        rows = rows_by_kind([kind for batch in records for kind in batch.kinds])
        scores = {
            f"{name}{suffix}": Scores(ratio[chosen], images[chosen])
            for suffix, chosen in rows.items()
            for name, ratio in _ratios(yes, label, chosen).items()
        }
        if len(rows) > 2:
            kinds = [chosen for suffix, chosen in rows.items() if suffix]
            scores["f1_mean"] = Scores(_mean_over_kinds(yes, label, kinds), images)
        return means_and_errors(scores)

    def sample_scores(self, records: Sequence[Decided]) -> SampleScores:
        yes, label, images = _tensors(records)
        return SampleScores(_ratios(yes, label, torch.ones_like(yes))["f1"], images)

    def counts(self, records: Sequence[Decided]) -> dict[str, Any]:
        return {"n_unmatched": sum(not matched for batch in records for matched in batch.matched)}


def _tensors(records: Sequence[Decided]) -> tuple[Tensor, Tensor, Tensor]:
    """Answers (n,), labels (n,) and the numbers of the images (n,)."""
    yes = torch.tensor([value for batch in records for value in batch.answers])
    label = torch.tensor([value for batch in records for value in batch.labels])
    return yes, label, number_names([file for batch in records for file in batch.files])


def _ratios(yes: Tensor, label: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Every metric of the questions in `rows` (n,), linearised: (n,), of which the values in `rows` have the metric as mean."""
    hits, all_rows = yes & label, torch.ones_like(yes)
    parts = {
        "accuracy": (yes == label, all_rows),
        "precision": (hits, yes),
        "recall": (hits, label),
        "f1": (2.0 * hits, yes.double() + label.double()),
        "yes_ratio": (yes, all_rows),
    }
    return {name: _linearise(above.double(), below.double(), rows) for name, (above, below) in parts.items()}


def _linearise(above: Tensor, below: Tensor, rows: Tensor) -> Tensor:
    """NaN if the denominator of all these rows is 0, such as precision without a yes."""
    ratio = above[rows].sum() / below[rows].sum()
    return ratio + (above - ratio * below) / below[rows].mean()


def _mean_over_kinds(yes: Tensor, label: Tensor, kinds: Sequence[Tensor]) -> Tensor:
    """The mean of F1 over the kinds, linearised, (n,)."""
    scores = [_ratios(yes, label, rows)["f1"] for rows in kinds]
    values = torch.stack([score[rows].mean() for score, rows in zip(scores, kinds, strict=True)]).mean().repeat(len(yes))
    for score, rows in zip(scores, kinds, strict=True):
        values[rows] += len(yes) / (len(kinds) * rows.sum()) * (score[rows] - score[rows].mean())
    return values
