"""Data sets by name: what is declared about each, and how to open one. Importing this module imports no torch.

A data set declares itself where it is implemented, and a plug-in of the user's own does the same:

    DATASETS.add(DatasetSpec("mine", "photos of my garden", "my_data:build", contents="labels", task="zeroshot_classification"))

The samples of a data set hold labels, captions, questions or objects (`contents`). A task declares the same word, so that data
and task can be matched before anything is loaded. Opened data comes as a `Source` (source.py), questions as `VqaData`
(vqa_items.py), objects to be found again as `ReidData` (reid/data.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from tokensieve.data.prompts import set_texts
from tokensieve.errors import UserError, did_you_mean, short
from tokensieve.files import format_template, read_lines
from tokensieve.registry import Registry, resolve

if TYPE_CHECKING:
    from tokensieve.data.source import Source

CLASSIFY = "zeroshot_classification"  # the task of most data sets with labels
OWN = "your own files"  # the group of data that a user names by its path
OF_IMAGES = ("labels", "captions", "images", None)  # contents that come as a Source
DEFAULT = "embedded"
MAX_PATH = 4000  # letters of a name or a path
QUESTION_FILES = (".json", ".jsonl", ".tsv")  # endings of files of questions


@dataclass(frozen=True)
class DatasetSpec:
    """What the command line, validation, tasks and messages have to know of a data set.

    name: the name of the data set, or a prefix where `argument` says what follows it: "wds/" with "NAME".
    build: "module:function" that opens the data set, imported when used. What it is called with depends on the contents:

        labels, captions, images, build(name, transform, options: SourceOptions) -> Source. name is the whole name, prefix
        None                      included; transform makes a tensor (3, h, w) of a Pillow image. A UserError if the data
                                  cannot be read. Samples that turn out unreadable later come as `Broken`. Custom class names
                                  and prompts and the number of samples (`--limit`) are applied by `build_source`.
        questions                 build(name, split=, limit=, root=, questions=, annotations=, images=) -> VqaData
        objects                   build(name, root, split, val_identities, modalities) -> ReidData

    """

    name: str
    summary: str  # one line, for help and docs
    build: str
    contents: str | None  # "labels", "captions", "images" (alone), "questions", "objects"; None: only opening it tells which
    task: str | None  # what --task auto means; None: the task of the name that follows the prefix
    group: str = "plug-ins"  # heading in messages that list the data sets
    argument: str = ""  # of a prefix: what follows it
    is_format: bool = False  # the prefix only says how the data is stored; folders and files are named without it
    shares: str = ""  # the prefix, where several declarations share one, each for other contents
    holds: str | None = None  # of such a declaration: "module:function", (name) -> bool, whether the data has its contents
    check: str | None = None  # "module:function", (name) -> None: a UserError if the data is not there; reads little of it
    model: str = ""  # of a run without --model, where it is another than the default of the model type

    @property
    def prefix(self) -> str:
        """What names begin with, of a declaration with an argument."""
        return self.shares or self.name

    @property
    def usage(self) -> str:
        """What to type."""
        return f"{self.prefix if self.argument else self.name}{self.argument}"


@dataclass(frozen=True)
class SourceOptions:
    """What a data set with labels or captions is opened with, besides its name and the transform."""

    folder: str  # --dataset_root with the name filled in
    split: str = "test"
    language: str = "en"
    task: str = CLASSIFY
    annotation_file: str = ""  # captions, where they are in a file of their own
    class_names: tuple[str, ...] = ()  # --classnames; empty: the data's own
    custom_template_file: str | None = None
    wds_cache_dir: str | None = None
    needs_class_names: bool = True  # whether the task uses class names and prompts


DATASETS: Registry[DatasetSpec] = Registry("data set")


def find_dataset(name: str, contents: str | None = None) -> DatasetSpec | None:
    """The declaration that a name belongs to: its own, or that of its prefix; None if there is none.

    Of several declarations of one prefix it is the one with the wanted contents, or the one that recognises the data, or the
    one that recognises nothing.
    """
    if name in DATASETS and not DATASETS[name].argument:
        return DATASETS[name]
    sharing = [spec for spec in DATASETS.values() if spec.argument and name.startswith(spec.prefix)]
    wanted = [spec for spec in sharing if contents is not None and spec.contents == contents]
    recognised = (spec for spec in sharing if spec.holds is not None and resolve(spec.holds)(name))
    others = (spec for spec in sharing if spec.holds is None)
    return next(chain(wanted, recognised, others), None)


def get_dataset(name: str, contents: str | None = None) -> DatasetSpec:
    """`find_dataset`, with a UserError that lists what there is."""
    spec = find_dataset(name, contents)
    if spec is not None:
        return spec
    if os.path.isdir(name):
        raise UserError(
            f"{short(name, 200)} is a folder: give folder:{short(name, 200)} if it holds a folder for each class, or "
            f"images:{short(name, 200)} if its images have no labels."
        )
    known = [spec.name for spec in DATASETS.values() if not spec.argument]
    groups: dict[str, dict[str, None]] = {}
    for spec in DATASETS.values():
        groups.setdefault(spec.group, {})[spec.usage] = None
    listed = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
    if name.startswith((f".{os.sep}", f"..{os.sep}", os.sep)) or name.endswith(os.sep):
        raise UserError(
            f"there is no file or folder {short(name, 200)!r}. Your own images are folder:DIR, images:DIR or csv:FILE."
        )
    raise UserError(f"there is no data set {short(name, 200)!r}.{did_you_mean(name, known)} Known are {listed}.")


def dataset_names(requested: Sequence[str] | None) -> list[str]:
    """The data sets of a run: names, collections, and text files with one name a line, in order; unknown ones are errors."""
    names: list[str] = []
    for name in requested or [DEFAULT]:
        check_names(name)
        if os.path.isfile(name) and find_dataset(name) is None:
            if name.lower().endswith((".csv", ".tsv")):
                raise UserError(f"{short(name, 200)} is a table: give csv:{short(name, 200)}.")
            names.extend(line.strip() for line in read_lines(name, "--dataset") if line.strip())
        elif find_dataset(name) is not None:
            names.append(name)
        else:
            from clip_benchmark.datasets.builder import dataset_collection

            names.extend(dataset_collection.get(name, [name]))
    for name in names:
        check_dataset(name)
    return names


def check_dataset(name: str) -> None:
    """A UserError if nothing of that name is declared, or if the user's data that it names is not there."""
    spec = get_dataset(name)
    if spec.check is not None:
        resolve(spec.check)(name)


def contents_of(name: str, wanted: str | None = None) -> str | None:
    """What the samples hold (`DatasetSpec.contents`); None where only opening the data tells.

    wanted: what a task needs, of data that may be read as one or the other.
    """
    return get_dataset(name, wanted).contents


def task_of(name: str) -> str:
    """The task that --task auto means for this data set."""
    spec = get_dataset(name)
    if spec.task is not None:
        return spec.task
    stored = find_dataset(name.removeprefix(spec.prefix))
    return stored.task if stored is not None and stored.task is not None else CLASSIFY


def short_name(name: str) -> str:
    """The name without a prefix that only says how the data is stored."""
    spec = find_dataset(name)
    return name.removeprefix(spec.prefix) if spec is not None and spec.is_format else name


def file_name(name: str) -> str:
    """The name as a part of file names: without folders, and questions without the path that follows their prefix.

    Of a user's own data the path is part of it, so that two folders of one name are told apart.
    """
    spec = find_dataset(name)
    if spec is not None and spec.group == OWN:
        given = os.path.normpath(name.removeprefix(spec.prefix)).removesuffix(".csv")
        words = [word for word in re.split(r"[/\\\\:]", given) if word]
        return "_".join([spec.prefix.rstrip(":"), *words])
    if spec is None or spec.contents != "questions" or not spec.argument:
        return name.removeprefix("wds/").replace("/", "_")
    layout, path = spec.name.rstrip(":"), PurePath(name.removeprefix(spec.name))
    if layout not in DATASETS:
        return path.stem
    return f"{layout}_{path.stem}" if path.suffix in QUESTION_FILES else layout


def _bare_name(name: str) -> str:
    """The name without any prefix."""
    while (spec := find_dataset(name)) is not None and spec.argument:
        name = name.removeprefix(spec.prefix)
    return name


def folder_of(name: str, root: str) -> str:
    """--dataset_root with the data set's name filled in."""
    plain = short_name(name)
    try:
        return format_template(root, "--dataset_root", dataset=plain, dataset_cleaned=plain.replace("/", "-"))
    except UserError as error:
        raise UserError(f"--dataset_root {short(root, 100)!r} may only hold {{dataset}} and {{dataset_cleaned}}.") from error


def check_names(name: str, root: str = "") -> None:
    """Raises a UserError for a name or a folder of a data set that no file can have."""
    if not name.isprintable() or len(name) > MAX_PATH:
        raise UserError(
            f"--dataset {short(name)!r} is no name of a data set: it is printable text of at most {MAX_PATH:,} letters"
        )
    is_path = "\0" not in root and not any("\ud800" <= letter <= "\udbff" for letter in root) and len(root) <= MAX_PATH
    if not is_path:
        raise UserError(f"--dataset_root {short(root)!r} is no path")


def build_source(
    name: str,
    transform: Callable[[Any], Any],
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
    needs_class_names: bool = True,
    class_names: Sequence[str] = (),
    contents: str | None = None,
) -> Source:
    """The data set of that name, which holds labels, captions or images alone, for that task.

    root may hold {dataset} and {dataset_cleaned}. limit: only the first samples. annotation_file: the captions of
    mscoco_captions, flickr30k and flickr8k. needs_class_names: whether the task uses class names and prompts;
    without them, data that has none can be read. class_names: in place of the data's own. contents: what the task needs, of
    data that may be read as one or the other.
    """
    from tokensieve.data.source import take_first

    check_names(name, root)
    spec, folder = get_dataset(name, contents), folder_of(name, root)
    if spec.contents not in OF_IMAGES:
        raise UserError(f"{name} has {spec.contents}, and the task {task} needs labels or captions.")
    if class_names and custom_classname_file:
        raise UserError("--classnames and --custom_classname_file both name the classes: give one of them.")
    options = SourceOptions(
        folder=folder,
        split=split,
        language=language,
        task=task,
        annotation_file=annotation_file,
        class_names=tuple(class_names),
        custom_template_file=custom_template_file,
        wds_cache_dir=wds_cache_dir,
        needs_class_names=needs_class_names,
    )
    source: Source = resolve(spec.build)(name, transform, options)
    source.classes = list(class_names or source.classes)
    if needs_class_names:
        set_texts(source, name, _bare_name(name), custom_classname_file, custom_template_file)
    source = take_first(source, limit)
    if source.size == 0:
        raise UserError(f"the data set {name} is empty (split {split!r} under {short(folder, 200)!r}).")
    return source
