"""A question about an image with its answers, and the data sets that hold such questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image
from torch.utils.data import Dataset


@dataclass(frozen=True)
class VqaItem:
    """An image, a question about it, and what people answered."""

    image: Image.Image
    question: str
    answers: list[str]
    id: str
    kind: str = ""  # of question, where the data has it
    file: str = ""  # which image: several questions may be about one

    @property
    def answer(self) -> str:
        """The answer that most people gave; of equals the first."""
        return most_frequent(self.answers)


def most_frequent(answers: Sequence[str]) -> str:
    """The most frequent answer; of equals the first."""
    return Counter(answers).most_common(1)[0][0]


class QuestionRecord(NamedTuple):
    """A question as the files have it."""

    file: str  # of the image, relative to the folder of images
    question: str
    answers: tuple[str, ...]
    id: str
    kind: str


class VqaData(Dataset[VqaItem]):
    """Questions with their images; an image that cannot be read is a BrokenImage when it is read."""

    name: str
    split: str
    fingerprint: str  # of all questions and of the images' files

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> VqaItem:
        raise NotImplementedError

    def check(self, allowed: float = 0.0) -> list[str]:
        """A UserError with all problems if the data does not fit together; else remarks on what is odd but harmless.

        allowed: the share of questions whose image may be missing (they then count as broken images).
        """
        return []
