"""`tokensieve show`: pictures of what plans keep, as PNG files. What is shown depends on the kind of input (registry.py)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tokensieve import files
from tokensieve.drawing.registry import SHOW_INPUTS
from tokensieve.drawing.sheet import Picture
from tokensieve.errors import UserError
from tokensieve.registry import resolve

DEFAULT_OUTPUT = "tokensieve-show.png"


def run(args: argparse.Namespace) -> list[Path]:
    """Draw all inputs under all plans into one picture, or with {image} in --output into one for each; the files."""
    kind = next(kind for kind in reversed(list(SHOW_INPUTS.values())) if resolve(kind.accepts)(args))
    paths: list[Path] = resolve(kind.run)(args)
    for path in paths:
        if not args.quiet and not files.is_stream(path):
            print(path)
    return paths


def dataset_names() -> Iterator[str]:
    """The data sets whose samples can be shown as NAME:N."""
    for kind in SHOW_INPUTS.values():
        yield from resolve(kind.datasets) if kind.datasets else ()


def sheets(template: str, names: Sequence[str], plan: str) -> dict[Path, list[int]]:
    """Which images, by their index, are drawn in which file. A UserError if one of the files cannot be written."""
    sheets: dict[Path, list[int]] = {}
    for number, name in enumerate(names):
        stem = Path(name).stem.replace(":", "-")
        path = files.output_path(template, "--output", image=stem, plan=files.slug(plan))
        if path.suffix.lower() != ".png" and not files.is_stream(path):
            raise UserError(f"--output {template}: pictures are PNG files, so the name has to end in .png")
        sheets.setdefault(path, []).append(number)
    if "{image}" in template and len(sheets) < len(names):
        twice = next(path for path, numbers in sheets.items() if len(numbers) > 1)
        raise UserError(f"--output {template!r} names {twice} for several images: leave {{image}} out or rename one of them")
    for path in sheets:
        files.check_writable(path)
    return sheets


def write(pictures: Mapping[Path, Picture]) -> list[Path]:
    """Write pictures, each completely or not at all. What lies there and is different is kept."""
    for path, picture in pictures.items():
        files.replace_file(path, picture.png())
    return list(pictures)
