"""Declares the data sets that ship: scenes drawn by code, with labels or captions. This module imports no torch."""

from __future__ import annotations

from tokensieve import embedded
from tokensieve.data.registry import CLASSIFY, DATASETS, DatasetSpec


def _declare(name: str, summary: str, contents: str, task: str) -> None:
    build = f"tokensieve.embedded.sources:build_{contents}"
    DATASETS.add(DatasetSpec(name, summary, build, contents, task, group="embedded"), origin=__name__)


_declare(embedded.DATASET, "scenes of one object, 80 classes of colour and shape", "labels", CLASSIFY)
_declare("embedded-heldout", "the same classes, only the pairs that no training image shows", "labels", CLASSIFY)
_declare("embedded-captions", "scenes of several objects, each with captions", "captions", "zeroshot_retrieval")
_declare("embedded-selection", "pairs of scenes that differ in one thing", "captions", "image_caption_selection")
