"""Data sets by name: clip_benchmark's (built by that package), its wds/... form, and the embedded scenes; all in one shape.

A sample is an image with a label, with a list of captions, or with a question (vqa.py), or it is an object to be found again
(reid.py). An image that cannot be read does not end a run: it arrives as `Broken` and is counted. Class names and prompts come
with the data; JSON files of the user's own replace them. Several processes share the batches of one: every batch is made of the
same samples whoever reads it, and knows its place in the order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tokensieve.data import vqa
from tokensieve.data.clip_benchmark import (
    CAPTION_TASKS,
    CAPTIONS,
    CLASSIFICATION,
    CLASSIFY,
    RETRIEVE,
    SELECT,
    captioned_source,
    check_caption_files,
    checked_source,
    custom_texts,
    open_dataset,
)
from tokensieve.data.source import Source, take_first
from tokensieve.data.streams import webdataset_source
from tokensieve.errors import UserError, nearest
from tokensieve.provenance import digest
from tokensieve.reid import layouts

ANSWER, FIND = "vqa", "reid"
EMBEDDED = {  # what --task auto means for each
    "embedded": CLASSIFY,
    "embedded-heldout": CLASSIFY,
    "embedded-captions": RETRIEVE,
    "embedded-selection": SELECT,
}
PREFIXES = ("wds/", "tfds/", "vtab/")


def read_list(path: str, flag: str) -> list[str]:
    """The lines of a text file that a flag names."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {path} is not a text file with one name a line: {error}.") from error


def dataset_names(given: Sequence[str] | None) -> list[str]:
    """The data sets of a run: names, collections, and text files with a name a line, in order; unknown ones are errors."""
    found: list[str] = []
    for name in given or ["embedded"]:
        if os.path.isfile(name):
            found.extend(line.strip() for line in read_list(name, "--dataset") if line.strip())
        elif name in EMBEDDED or name in CLASSIFICATION or exclusive_task(name):
            found.append(name)
        else:
            from clip_benchmark.datasets.builder import dataset_collection

            found.extend(dataset_collection.get(name, [name]))
    for name in found:
        check_dataset(name)
    return found


def check_dataset(name: str) -> None:
    """A UserError if nothing of that name is known."""
    known = (*EMBEDDED, *CLASSIFICATION, *CAPTIONS, *vqa.NAMES, *layouts.NAMES)
    if name not in known and not name.startswith((*PREFIXES, vqa.PREFIX)):
        written = {word.lower(): word for word in known}  # some names have capitals
        meant = nearest(name, known) or written.get(nearest(name.lower(), written) or "")
        raise UserError(
            f"there is no data set {name!r}.{f' Did you mean {meant!r}?' if meant else ''} Known: {', '.join(known)}, "
            f"and wds/NAME, tfds/NAME, vtab/NAME, jsonl:FILE (questions)."
        )


def exclusive_task(name: str) -> str | None:
    """The task of data that no other task can use: questions, and objects to be found again; None for other data."""
    if name in vqa.NAMES or name.startswith(vqa.PREFIX):
        return ANSWER
    return FIND if name in layouts.NAMES else None


def contents_of(name: str) -> str | None:
    """What the samples of a data set hold: "labels", "captions", "questions" or "objects"; None for shards, which tell themselves."""
    if own := exclusive_task(name):
        return {ANSWER: "questions", FIND: "objects"}[own]
    if name.startswith("wds/"):
        return None
    return "captions" if name in CAPTIONS or EMBEDDED.get(name) in CAPTION_TASKS else "labels"


def task_of(name: str) -> str:
    """The task that --task auto means for this data set."""
    if own := exclusive_task(name):
        return own
    if name in EMBEDDED:
        return EMBEDDED[name]
    from clip_benchmark.datasets.builder import get_dataset_default_task

    return str(get_dataset_default_task(name.removeprefix("wds/")))


def _check_task(name: str, captions: bool, task: str) -> None:
    """A UserError if a task on captions is given labels, or one on labels captions."""
    if captions and task not in CAPTION_TASKS:
        raise UserError(
            f"{name} has captions, but the task {task} needs labels: give --task {' or '.join(CAPTION_TASKS)}, "
            f"or another --dataset, embedded say."
        )
    if not captions and task in CAPTION_TASKS:
        example = next(known for known, meant in EMBEDDED.items() if meant == (SELECT if task == SELECT else RETRIEVE))
        raise UserError(
            f"{name} has labels, but the task {task} needs captions: give --task zeroshot_classification or linear_probe, "
            f"or another --dataset, {example} say."
        )


def folder_of(name: str, root: str) -> str:
    """--dataset_root with the data set's name filled in."""
    short = name.removeprefix("wds/")
    try:
        return root.format(dataset=short, dataset_cleaned=short.replace("/", "-"))
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"--dataset_root {root!r} may only hold {{dataset}} and {{dataset_cleaned}}.") from error


def build_source(
    name: str,
    transform: Callable[[Any], Tensor],
    *,
    root: str = "root",
    split: str = "test",
    language: str = "en",
    limit: int | None = None,
    wds_cache_dir: str | None = None,
    custom_classname_file: str | None = None,
    custom_template_file: str | None = None,
    task: str = CLASSIFY,
    annotation_file: str = "",
) -> Source:
    """The data set of that name for that task.

    root may hold {dataset} and {dataset_cleaned}. limit: only the first samples. annotation_file: the captions of
    mscoco_captions, flickr30k and flickr8k. Class names and prompts are demanded for zero-shot classification only.
    """
    short, folder = name.removeprefix("wds/"), folder_of(name, root)
    if not name.startswith("wds/"):  # shards tell themselves what they hold
        _check_task(name, name in CAPTIONS or EMBEDDED.get(name) in CAPTION_TASKS, task)
    if name in EMBEDDED:
        source = _embedded(name, transform, split, language)
    else:
        if name in CAPTIONS:
            check_caption_files(name, folder, split, language, annotation_file)
        given = open_dataset(
            name, transform, folder, split, language, wds_cache_dir, custom_template_file, task, annotation_file
        )
        if name.startswith("wds/"):
            source = webdataset_source(given, transform, wds_cache_dir)
            _check_task(name, source.captions, task)
        elif name in CAPTIONS and name != "winoground":
            source = captioned_source(given, transform, name, folder, split, language)
        else:
            source = checked_source(given, name, folder, split)

    if task == CLASSIFY:
        keys = [name, short.removeprefix("tfds/").removeprefix("vtab/")]
        classes = custom_texts(custom_classname_file, "--custom_classname_file", keys)
        templates = custom_texts(custom_template_file, "--custom_template_file", [*keys, "imagenet1k"])
        source.classes = list(classes or source.classes)
        source.templates = templates or source.templates
        if not source.classes or not source.templates:
            what = "class names" if not source.classes else "prompt templates"
            raise UserError(f"{name} has no {what}: give --custom_classname_file and --custom_template_file.")
        source.fingerprint = digest([source.fingerprint, source.classes, source.templates])
    source = take_first(source, limit)
    if source.size == 0:
        raise UserError(f"the data set {name} is empty (split {split!r} under {folder!r}).")
    return source


def _embedded(name: str, transform: Callable[[Any], Tensor], split: str, language: str) -> Source:
    from tokensieve.embedded import datasets

    if language != "en":
        raise UserError(f"{name} is in 'en' only, not in {language!r}.")
    mark = [name, split]  # drawn by code from fixed seeds, and the code is in the key of every result already
    if EMBEDDED[name] in CAPTION_TASKS:
        made = datasets.EmbeddedCaptions if EMBEDDED[name] == RETRIEVE else datasets.EmbeddedSelection
        pictures: Any = made(split, transform=transform)
        return Source(pictures, [], [], digest([*mark, len(pictures)]), captions=True)
    scenes = datasets.EmbeddedScenes(split, pairs="heldout" if name == "embedded-heldout" else "seen", transform=transform)
    return Source(scenes, list(scenes.classes), list(scenes.templates), digest([*mark, len(scenes)]))
