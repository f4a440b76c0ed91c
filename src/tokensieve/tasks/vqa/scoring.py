"""The interface of a scoring: answers of a model become records, and all records become metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokensieve.data.vqa_items import VqaItem
from tokensieve.tasks.base import Record, SampleScores
from tokensieve.tasks.statistics import grouped_stderr


class Reference(NamedTuple):
    """What a question's answer is judged by."""

    answers: list[str]
    kind: str
    file: str
    id: str
    choices: tuple[str, ...]
    turn: int
    question: str = ""

    @classmethod
    def of(cls, item: VqaItem) -> Reference:
        return cls(item.answers, item.kind, item.file, item.id, item.choices, item.turn, item.question)


class Scoring:
    """How the answers of one kind of question are scored."""

    metric: str  # the headline
    prompt: str  # holds {question}

    def record(self, answers: Sequence[str], references: Sequence[Reference]) -> Record:
        """What is kept of a batch: a number or a text for each question."""
        raise NotImplementedError

    def judge(self, answer: str, reference: Reference) -> tuple[str | None, float]:
        """What an answer is taken for, and its score from 0 to 1."""
        raise NotImplementedError

    def metrics(self, records: Sequence[Record]) -> dict[str, float]:
        """The metrics of all questions and of every kind there is, then their standard errors.

        Questions about one image are not independent of each other: standard errors are those of whole images.
        """
        raise NotImplementedError

    def sample_scores(self, records: Sequence[Record]) -> SampleScores:
        """Values whose mean is the headline, by question, with the number of the image."""
        raise NotImplementedError

    def counts(self, records: Sequence[Record]) -> dict[str, Any]:
        return {}


class Scores(NamedTuple):
    """A metric as a mean over questions."""

    values: Tensor  # (n,)
    images: Tensor  # (n,), the number of each question's image

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def stderr(self) -> float:
        return grouped_stderr(*self)


def means_and_errors(scores: dict[str, Scores]) -> dict[str, float]:
    """The mean of every metric, then their standard errors."""
    means = {name: score.mean for name, score in scores.items()}
    return means | {f"{name}_stderr": score.stderr for name, score in scores.items()}


def number_names(names: Sequence[str]) -> Tensor:
    """A number for each different name, (n,)."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])


def rows_by_kind(kinds: Sequence[str]) -> dict[str, Tensor]:
    """By the suffix of a metric's name, which questions it is of, (n,): "" for all, then one for every kind."""
    rows = {"": torch.ones(len(kinds), dtype=torch.bool)}
    for kind in dict.fromkeys(filter(None, kinds)):
        rows["_" + re.sub(r"\W+", "_", kind)] = torch.tensor([one == kind for one in kinds])
    return rows
