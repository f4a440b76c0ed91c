"""A question about an image or a video with its answers, and the data sets that hold such questions."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image
from torch.utils.data import Dataset

from tokensieve.data.videos import Video
from tokensieve.errors import UserError

LETTERS = string.ascii_uppercase  # of the options of a multiple choice


@dataclass(frozen=True)
class VqaItem:
    """An image, a question about it, and what people answered."""

    image: Image.Image
    question: str  # with its options, if there are any
    answers: list[str]
    id: str
    kind: str = ""  # of question, where the data has it
    file: str = ""  # which image: several questions may be about one
    choices: tuple[str, ...] = ()  # the options of a multiple choice, from A on; the answer is a letter
    turn: int = 0  # by how many positions the options are rotated
    video: Video | None = None  # what the question is about, if not about a single image; `image` is then its first frame

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
    choices: tuple[str, ...] = ()
    turn: int = 0

    @property
    def text(self) -> str:
        """The question, and its options below it, each on a line with its letter."""
        return "\n".join(
            [self.question, *(f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=False))]
        )

    def rotations(self) -> list[QuestionRecord]:
        """The question with its options in every rotation: first as it is, then A's text moves to the end, and so on."""
        n, right = len(self.choices), LETTERS.index(self.answers[0])
        return [
            self._replace(choices=self.choices[turn:] + self.choices[:turn], answers=(LETTERS[(right - turn) % n],), turn=turn)
            for turn in range(n)
        ]


class VqaData(Dataset[VqaItem]):
    """Questions with their images; an image that cannot be read is a BrokenImage when it is read.

    scoring: what answers are expected, by which the task sets the prompt and the metrics:

        open        a few words, by VQA accuracy and exact match
        yes_no      yes or no, by accuracy, precision, recall and F1
        choice      the letter of one of the item's choices, by accuracy
    """

    name: str
    split: str
    fingerprint: str  # of all questions and of the images' files
    scoring: str = "open"

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> VqaItem:
        raise NotImplementedError

    def check(self, allowed: float = 0.0) -> list[str]:
        """A UserError with all problems if the data does not fit together; else remarks on what is odd but harmless.

        allowed: the share of questions whose image may be missing (they then count as broken images).
        """
        return []

    def in_all_rotations(self) -> VqaData:
        """The same questions, each once for every rotation of its options; a UserError if they have none."""
        raise UserError(f"--circular: the questions of {self.name} have no options to rotate; leave it out.")

    def with_frames(self, number: int) -> VqaData:
        """The same questions, with so many frames of each video; a UserError if they are not about videos."""
        raise UserError(f"--frames: the questions of {self.name} are about images; leave it out.")
