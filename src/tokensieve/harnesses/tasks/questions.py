"""The embedded questions for lm-eval: what tokensieve_questions.yaml names."""

from __future__ import annotations

import functools
from typing import Any

from PIL import Image

from tokensieve.data.vqa_scenes import SceneQuestions
from tokensieve.tasks.vqa.scores import soft_score

NAME = "embedded-questions"


@functools.cache
def _scenes() -> SceneQuestions:
    return SceneQuestions(NAME, split="test", limit=None)


def dataset(**settings: Any) -> dict[str, Any]:
    """The questions and answers of the test split; pictures are drawn when they are asked about."""
    import datasets

    asked = [_scenes().scenes.ask(index)[1] for index in range(len(_scenes()))]
    rows = [{"number": number, "question": one.text, "answer": one.answer} for number, one in enumerate(asked)]
    return {"test": datasets.Dataset.from_list(rows)}


def images(row: dict[str, Any]) -> list[Image.Image]:
    """The picture of a question."""
    return [_scenes()[row["number"]].image]


def text(row: dict[str, Any]) -> str:
    """The question behind lm-eval's place for the image."""
    return f"<image>{row['question']}"


def score(row: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """VQA's score of the answer, as `tokensieve eval` computes it."""
    return {"vqa_score": soft_score(answers[0].strip(), [row["answer"]])}
