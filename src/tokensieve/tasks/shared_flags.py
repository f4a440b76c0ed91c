"""Flags that several tasks declare."""

from __future__ import annotations

from tokensieve.flags import Flag

ANNOTATION_FILE = Flag(
    "annotation_file",
    "captions, where a data set has them apart",
    default="",
    options={"metavar": "FILE"},
    group="files",
    repeats=True,
)
