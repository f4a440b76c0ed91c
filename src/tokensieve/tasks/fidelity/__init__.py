"""Fidelity: how near a plan is to the full model on images without labels. The declaration; `task.py` implements it."""

from __future__ import annotations

from tokensieve import embedded
from tokensieve.tasks.registry import TASKS, TaskSpec

TASKS.add(
    TaskSpec(
        "fidelity",
        "how near the image features are to those of the full model; needs no labels",
        implementation="tokensieve.tasks.fidelity.task:FidelityTask",
        contents="images",
        dataset=embedded.DATASET,
        metrics=("cosine", "distance", "agreement"),
        main_metrics=("cosine",),
        percent=("agreement",),
        order=45,
    ),
    origin=__name__,
)
