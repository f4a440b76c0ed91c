"""Scores of open answers: VQA's normalisation, its soft score, and the exact match.

vqa_score is VQA's own: an answer is worth min(1, m/3) where m of the other nine people gave the same, averaged over leaving
each of the ten out. exact_match is 1 if it is the most frequent answer. Both compare answers as VQA does: lower case, number
words as digits, no articles, contractions with their apostrophe, punctuation as https://visualqa.org/evaluation.html tells.

Where we differ: VQA's program leaves answers as they are where all people agree, so that "two" would be wrong where all ten
wrote "2"; here both are always made alike. With other than ten people m is held against 3, or all others if they are fewer;
with one, both numbers are the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from tokensieve.data.vqa_items import most_frequent
from tokensieve.tasks.base import SampleScores
from tokensieve.tasks.vqa.answering import SHORT
from tokensieve.tasks.vqa.scoring import Reference, Scores, Scoring, means_and_errors, number_names, rows_by_kind

MARKS = ';/[]"{}()=+\\_-><@`,?!'  # all punctuation but the apostrophe, the colon (2:50) and the full stop
ARTICLES = ("a", "an", "the")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = {"none": "0"} | {word: str(number) for number, word in enumerate(NUMBERS)}
_PEOPLE = "somebody someone something everybody everyone"
_CONTRACTED = {  # what is contracted, and the words before it; only where the two without an apostrophe are no other word
    "n't": "ai are ca could did does do had has have is might must need ought sha should was were wo would",
    "'ve": "could i might must should they we what where who would you",
    "'ll": f"how it that they what who why you {_PEOPLE}",
    "'re": "there they what why you",
    "'d": f"he how it that there they when where who you {_PEOPLE}",
    "'s": "he how she that there what when where who why",
    "'m": "i",
}
CONTRACTIONS = {f"{word}{end}".replace("'", ""): f"{word}{end}" for end, words in _CONTRACTED.items() for word in words.split()}
CONTRACTIONS |= {"maam": "ma'am", "oclock": "o'clock", "twas": "'twas", "yall": "y'all", "lets": "let's"}


@cache
def normalise(answer: str) -> str:
    """The answer as it is compared.

    >>> normalise("The 2 Dogs."), normalise("dont know"), normalise("1,000"), normalise("black/white")
    ('2 dogs', "don't know", '1000', 'black white')
    """
    text = " ".join(answer.lower().split())
    grouped = re.search(r"\d,\d", text) is not None  # 100,978
    made = text
    for mark in MARKS:
        beside_a_space = f"{mark} " in text or f" {mark}" in text
        made = made.replace(mark, "" if beside_a_space or grouped else " ")
    made = re.sub(r"\.(?!\d)", "", made)  # a full stop, but not a decimal point
    words = [DIGITS.get(word, word) for word in made.split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def soft_score(answer: str, answers: Sequence[str]) -> float:
    """VQA's score of an answer, from 0 to 1."""
    references = [normalise(one) for one in answers]
    same = references.count(normalise(answer))
    others = len(references) - 1
    if others == 0:
        return float(same)
    enough = min(3, others)
    # of those left out, `same` agreed and leave one fewer behind
    return (same * min(1.0, (same - 1) / enough) + (len(references) - same) * min(1.0, same / enough)) / len(references)


def exact_match(answer: str, answers: Sequence[str]) -> float:
    """1 if the answer is the one that most people gave, else 0."""
    return float(normalise(answer) == most_frequent([normalise(one) for one in answers]))


class Scored(NamedTuple):
    """What is kept of a batch, a number for each question."""

    soft: list[float]
    exact: list[float]
    kinds: list[str]
    files: list[str]


class OpenAnswers(Scoring):
    """Answers of a few words, held against those of people."""

    metric = "vqa_score"

    def __init__(self, prompt: str = SHORT) -> None:
        self.prompt = prompt

    def record(self, answers: Sequence[str], references: Sequence[Reference]) -> Scored:
        pairs = [(answer, reference.answers) for answer, reference in zip(answers, references, strict=True)]
        return Scored(
            [soft_score(*pair) for pair in pairs],
            [exact_match(*pair) for pair in pairs],
            [reference.kind for reference in references],
            [reference.file for reference in references],
        )

    def judge(self, answer: str, reference: Reference) -> tuple[str, float]:
        return normalise(answer), soft_score(answer, reference.answers)

    def metrics(self, records: Sequence[Scored]) -> dict[str, float]:
        soft, images = self.sample_scores(records)
        exact = torch.tensor([value for batch in records for value in batch.exact], dtype=torch.float64)
        return means_and_errors(
            {
                f"{name}{suffix}": Scores(values[rows], images[rows])
                for suffix, rows in rows_by_kind([kind for batch in records for kind in batch.kinds]).items()
                for name, values in (("vqa_score", soft), ("exact_match", exact))
            }
        )

    def sample_scores(self, records: Sequence[Scored]) -> SampleScores:
        soft = torch.tensor([value for batch in records for value in batch.soft], dtype=torch.float64)
        return SampleScores(soft, number_names([file for batch in records for file in batch.files]))
