"""Scores of answers: VQA's normalisation, its soft score, and the exact match."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tokensieve.data.vqa_items import most_frequent
from tokensieve.tasks.statistics import grouped_stderr

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


def soft_scores(records: Sequence[Scored]) -> tuple[Tensor, Tensor]:
    """The score of every question, (n,), and the number of its image, (n,)."""
    files: dict[str, int] = {}
    image = [files.setdefault(file, len(files)) for batch in records for file in batch.files]
    return torch.tensor([value for batch in records for value in batch.soft], dtype=torch.float64), torch.tensor(image)


def metrics(records: Sequence[Scored]) -> dict[str, float]:
    """vqa_score and exact_match of all questions and of every kind there is, then their standard errors.

    Questions about one image are not independent of each other: standard errors are those of whole images.
    """
    soft, image = soft_scores(records)
    exact = torch.tensor([value for batch in records for value in batch.exact], dtype=torch.float64)
    kinds = [kind for batch in records for kind in batch.kinds]
    chosen = {"": torch.ones(len(kinds), dtype=torch.bool)}
    for kind in dict.fromkeys(filter(None, kinds)):
        name = re.sub(r"\W+", "_", kind)
        chosen[f"_{name}"] = torch.tensor([one == kind for one in kinds])
    numbers = {
        f"{metric}{suffix}": (values[rows], image[rows])
        for suffix, rows in chosen.items()
        for metric, values in (("vqa_score", soft), ("exact_match", exact))
    }
    shares = {name: float(values.mean()) for name, (values, _) in numbers.items()}
    return shares | {f"{name}_stderr": grouped_stderr(values, groups) for name, (values, groups) in numbers.items()}
