"""Data of the user's own, named by a prefix and a path. What the prefixes mean is declared here, without importing torch.

    folder:PHOTOS      a folder for each class, with images at any depth (folders.py); of re-identification see reid/own.py
    csv:FILE           a table with images and labels, captions, or questions, by the names of its columns (tables.py)
    images:PHOTOS      images without labels: a folder, or a single file
    videos:FOLDER      videos with a table of questions about them (vqa_layouts/videos.py)

Images are read by `open_photo`: upright, as their EXIF says. Paths in a table are relative to the table.
"""

from __future__ import annotations

from tokensieve.data.registry import CLASSIFY, DATASETS, OWN, DatasetSpec

_HERE = "tokensieve.data.own"


def _declare(name: str, summary: str, build: str, contents: str, task: str, prefix: str = "", holds: str | None = None) -> None:
    kind = prefix or name
    DATASETS.add(
        DatasetSpec(
            name,
            summary,
            build,
            contents,
            task,
            group=OWN,
            argument="FILE" if kind == "csv:" else "DIR",
            shares=prefix,
            holds=holds,
            check=f"{_HERE}.{'tables:check' if kind == 'csv:' else 'folders:check'}",
        ),
        origin=__name__,
    )


_declare("folder:", "images in a folder for each class", f"{_HERE}.sources:build_folder", "labels", CLASSIFY)
_declare("images:", "images without labels", f"{_HERE}.sources:build_images", "images", "fidelity")
_declare("csv:", "images with labels, in a table", f"{_HERE}.sources:build_labels", "labels", CLASSIFY)
_declare(
    "captions in csv:",
    "images with captions, in a table",
    f"{_HERE}.sources:build_captions",
    "captions",
    "zeroshot_retrieval",
    "csv:",
    f"{_HERE}.tables:has_captions",
)
_declare(
    "questions in csv:",
    "questions about images or videos, in a table",
    "tokensieve.data.vqa_files:build",
    "questions",
    "vqa",
    "csv:",
    f"{_HERE}.tables:has_questions",
)
DATASETS.add(
    DatasetSpec(
        "videos:",
        "questions about videos, in a folder with questions.csv",
        "tokensieve.data.vqa_files:build",
        "questions",
        "vqa",
        group=OWN,
        argument="DIR",
        check=f"{_HERE}.folders:check_videos",
    ),
    origin=__name__,
)
