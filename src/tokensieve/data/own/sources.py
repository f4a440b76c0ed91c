"""The user's own images as sources: class folders, tables with labels or captions, images alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from tokensieve.data.images import BrokenImage, open_photo
from tokensieve.data.own import classes, folders, tables
from tokensieve.data.registry import SourceOptions
from tokensieve.data.source import Broken, Source
from tokensieve.errors import UserError, short
from tokensieve.provenance import digest, file_stat

OTHER_WAYS = "give more of them, more names in --classnames, or images: for images without labels"


class Photos(Dataset[Any]):
    """Image files with their targets: (image, target), or Broken."""

    def __init__(self, files: Sequence[str], targets: Sequence[Any], transform: Callable[[Any], Tensor]) -> None:
        self.files, self.targets, self.transform = files, targets, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.transform(open_photo(self.files[index])), self.targets[index]
        except BrokenImage as error:
            return Broken(self.files[index], str(error))


def build_folder(name: str, transform: Callable[[Any], Tensor], options: SourceOptions) -> Source:
    """folder:PHOTOS, a folder for each class."""
    folders.check(name)
    top = folders.path_of(name)
    root = folders.split_folder(top, options.split)
    words = classes.sort_words(folders.folders_in(root))
    listings = {word: folders.list_images(root / word) for word in words}
    empty = [word for word, listing in listings.items() if not listing.images]
    found = [word for word in words if word not in empty]
    outside = sum(entry.name.lower().endswith(folders.SUFFIXES) for entry in os.scandir(root) if not entry.is_dir())
    if not found:
        hint = f"images:{short(top, 200)} takes those in it without labels" if outside else "there is no image in it"
        raise UserError(f"{short(root, 200)} has no folder of a class with images; {hint}.")
    notes = [f"{word}: {listing.note}" for word, listing in listings.items() if listing.note]
    notes += [f"left out, images in no folder of a class: {outside}"] if outside else []
    notes += [f"left out, folders without an image: {short(', '.join(empty), 200)}"] if empty else []
    names, numbers = classes.name_classes(found, _given(options, top, found), name)
    if options.needs_class_names or options.task == "linear_probe":
        classes.check_enough(names, short(root, 200), OTHER_WAYS)
    files = [(str(file), number) for word, number in zip(found, numbers, strict=True) for file in listings[word].images]
    return _source(name, transform, options, top, files, names, notes)


def build_images(name: str, transform: Callable[[Any], Tensor], options: SourceOptions) -> Source:
    """images:PHOTOS, a folder or a file."""
    folders.check(name)
    top = folders.path_of(name)
    if top.is_file():
        return _source(name, transform, options, top.parent, [(str(top), 0)], [], [])
    root = folders.split_folder(top, options.split)
    listing = folders.list_images(root)
    if not listing.images:
        raise UserError(f"there is no image in {short(top, 200)}{f'; {listing.note}' if listing.note else ''}.")
    notes = [f"only the split {short(root.name)} is read; --split takes another one"] if root != top else []
    notes += [listing.note] if listing.note else []
    return _source(name, transform, options, top, [(str(file), 0) for file in listing.images], [], notes)


def build_labels(name: str, transform: Callable[[Any], Tensor], options: SourceOptions) -> Source:
    """csv:FILE with images and labels."""
    table = _read(name, options)
    image, label = table.need("image"), table.need("label")
    label_of: dict[str, str] = {}
    problems, repeated = [], 0
    for row in table.rows:
        file, word = table.image_path(row.cells[image]), row.cells[label].strip()
        if not word or not row.cells[image].strip():
            problems.append(f"line {row.line} has no {'image' if word else 'label'}")
        elif file not in label_of:
            label_of[file] = word
        elif label_of[file] == word:
            repeated += 1
        else:
            both = f"{short(label_of[file])} and {short(word)}"
            problems.append(f"line {row.line}: {short(row.cells[image], 100)} has two labels, {both}")
    if problems:
        raise table.error(problems)
    _check_files(table, label_of)
    found = classes.sort_words(list(label_of.values()))
    names, numbers = classes.name_classes(found, _given(options, table.path.parent, found), name)
    number_of = dict(zip(found, numbers, strict=True))
    if options.needs_class_names or options.task == "linear_probe":
        classes.check_enough(names, short(table.path, 200), OTHER_WAYS)
    files = [(file, number_of[word]) for file, word in label_of.items()]
    notes = [f"rows that repeat an image with its label, which count once: {repeated}"] if repeated else []
    return _source(name, transform, options, table.path.parent, files, names, notes)


def build_captions(name: str, transform: Callable[[Any], Tensor], options: SourceOptions) -> Source:
    """csv:FILE with images and captions: several rows of an image are its captions."""
    table = _read(name, options)
    image, caption = table.need("image"), table.need("caption")
    captions: dict[str, list[str]] = {}
    problems, repeated = [], 0
    for row in table.rows:
        file, text = table.image_path(row.cells[image]), row.cells[caption].strip()
        if not text or not row.cells[image].strip():
            problems.append(f"line {row.line} has no {'image' if text else 'caption'}")
        elif text in captions.setdefault(file, []):
            repeated += 1
        else:
            captions[file].append(text)
    if problems:
        raise table.error(problems)
    _check_files(table, captions)
    notes = [f"rows that repeat an image with its caption, which count once: {repeated}"] if repeated else []
    made = _source(name, transform, options, table.path.parent, list(captions.items()), [], notes)
    made.captions = True
    return made


def _read(name: str, options: SourceOptions) -> tables.Table:
    tables.check(name)
    return tables.read_table(tables.path_of(name)).of_split(options.split)


def _check_files(table: tables.Table, files: Sequence[str] | dict[str, Any]) -> None:
    """A UserError if no image is there. Single ones that are not count as unreadable when they are read."""
    if not any(map(os.path.exists, files)):
        first = short(next(iter(files)), 200)
        raise UserError(
            f"none of the {len(files)} images of {short(table.path, 200)} is there, the first would be {first}: paths are "
            "relative to the folder of the table."
        )


def _given(options: SourceOptions, folder: Path, found: Sequence[str]) -> Sequence[str]:
    """The class names that the user gives: by --classnames, or in a file beside the data."""
    return options.class_names or classes.read_classes(folder, found)


def _source(
    name: str,
    transform: Callable[[Any], Tensor],
    options: SourceOptions,
    folder: Path,
    samples: Sequence[tuple[str, Any]],
    names: list[str],
    notes: Sequence[str],
) -> Source:
    templates = classes.read_templates(folder)
    if options.needs_class_names and options.language != "en" and not (templates or options.custom_template_file):
        raise UserError(
            f"{short(name, 200)} has prompts in en, not in {short(options.language)!r}: write them to "
            f"{short(folder / classes.TEMPLATES, 200)}, one a line with {{c}} for the class."
        )
    files, targets = [file for file, _ in samples], [target for _, target in samples]
    marks = [(os.path.relpath(file, folder), *file_stat(file), target) for file, target in samples]
    return Source(
        Photos(files, targets, transform),
        names,
        templates or list(classes.DEFAULT_TEMPLATES),
        digest([name, options.split, names, marks]),
        notes=tuple(f"{short(name, 200)}: {note}" for note in notes),
        names=files,
    )
