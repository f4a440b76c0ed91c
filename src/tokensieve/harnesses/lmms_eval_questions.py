"""The embedded questions for lmms-eval: what lmms_tasks/tokensieve_questions.yaml names."""

from __future__ import annotations

from typing import Any

from tokensieve.harnesses.tasks import questions


def ask(lines: Any) -> Any:
    """The questions and answers of the test split, for lines that are not used."""
    return questions.dataset()["test"]


def text(row: dict[str, Any], settings: Any = None) -> str:
    """The question of a row."""
    return str(row["question"])


def messages(row: dict[str, Any], settings: Any = None) -> list[dict[str, Any]]:
    """The picture of a row, then its question, as one message of a chat."""
    pictures = [{"type": "image", "url": image} for image in questions.images(row)]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": text(row)}]}]


def score(row: dict[str, Any], answers: list[Any]) -> dict[str, float]:
    """VQA's score of the answer: a text, or an object that holds it."""
    return questions.score(row, [getattr(answer, "text", answer) for answer in answers])
