"""Multiple choice: the model answers with the letter of an option. An answer that names no option is wrong.

`accuracy` is of the options in the order of the data. If every question was asked in all rotations of its options,
`accuracy_circular` is the share of questions that are right in each of them: a model that prefers a letter gains nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokensieve.data.vqa_items import LETTERS
from tokensieve.tasks.base import SampleScores
from tokensieve.tasks.vqa.scores import normalise
from tokensieve.tasks.vqa.scoring import Reference, Scores, Scoring, means_and_errors, number_names, rows_by_kind

LETTER = "{question}\nAnswer with the option's letter from the given choices directly."  # prompt
_FIRST = re.compile(r"\(?([A-Z])(?:[).:,\n]|$)")  # "B", "(B)", "B. red", but not "A dog"
_NAMED = re.compile(r"[Aa]nswer(?: is|:)\s*\(?([A-Z])(?:[).:,\s]|$)")  # "The answer is B."


def chosen_letter(answer: str, choices: Sequence[str]) -> str | None:
    """The letter of the option that an answer names, by the letter or by the text of the option; None if it names none.

    >>> options = ["red", "blue"]
    >>> [chosen_letter(text, options) for text in ("B", "(b)", "A. red", "The answer is B.", "Blue.", "C", "A dog")]
    ['B', 'B', 'A', 'B', 'B', None, None]
    """
    letters, text = LETTERS[: len(choices)], answer.strip()
    if re.fullmatch(r"\(?[a-z]\)?\.?", text):
        text = text.upper()
    match = _FIRST.match(text) or _NAMED.search(text)
    if match:
        return match[1] if match[1] in letters else None
    same = [letter for letter, choice in zip(letters, choices, strict=True) if normalise(choice) == normalise(text)]
    return same[0] if len(same) == 1 else None


class Chosen(NamedTuple):
    """What is kept of a batch, for each question."""

    right: list[float]
    matched: list[bool]  # the answer names an option
    kinds: list[str]
    files: list[str]
    ids: list[str]
    turns: list[int]


class Choices(Scoring):
    prompt = LETTER

    def __init__(self, circular: bool) -> None:
        self.circular = circular
        self.metric = "accuracy_circular" if circular else "accuracy"

    def record(self, answers: Sequence[str], references: Sequence[Reference]) -> Chosen:
        judged = [self.judge(answer, one) for answer, one in zip(answers, references, strict=True)]
        return Chosen(
            [score for _, score in judged],
            [letter is not None for letter, _ in judged],
            [one.kind for one in references],
            [one.file for one in references],
            [one.id for one in references],
            [one.turn for one in references],
        )

    def judge(self, answer: str, reference: Reference) -> tuple[str | None, float]:
        letter = chosen_letter(answer, reference.choices)
        return letter, float(letter == reference.answers[0])

    def metrics(self, records: Sequence[Chosen]) -> dict[str, float]:
        first = torch.tensor([turn == 0 for batch in records for turn in batch.turns])
        right = torch.tensor([value for batch in records for value in batch.right], dtype=torch.float64)
        images = number_names([file for batch in records for file in batch.files])[first]
        values = {"accuracy_circular": _right_in_all(records, right)[first]} if self.circular else {}
        values["accuracy"] = right[first]
        kinds = [kind for batch in records for kind, turn in zip(batch.kinds, batch.turns, strict=True) if turn == 0]
        return means_and_errors(
            {
                f"{name}{suffix}": Scores(score[rows], images[rows])
                for suffix, rows in rows_by_kind(kinds).items()
                for name, score in values.items()
            }
        )

    def sample_scores(self, records: Sequence[Chosen]) -> SampleScores:
        first = torch.tensor([turn == 0 for batch in records for turn in batch.turns])
        right = torch.tensor([value for batch in records for value in batch.right], dtype=torch.float64)
        images = number_names([file for batch in records for file in batch.files])
        score = _right_in_all(records, right) if self.circular else right
        return SampleScores(score[first], images[first])

    def counts(self, records: Sequence[Chosen]) -> dict[str, Any]:
        questions = len({key for batch in records for key in batch.ids})
        return {"n_questions": questions, "n_unmatched": sum(not matched for batch in records for matched in batch.matched)}


def _right_in_all(records: Sequence[Chosen], right: Tensor) -> Tensor:
    """For every asked rotation, (n,), whether all rotations of its question are right."""
    question = number_names([key for batch in records for key in batch.ids])
    least = torch.ones(int(question.max()) + 1, dtype=right.dtype)
    return least.scatter_reduce(0, question, right, "amin")[question]
