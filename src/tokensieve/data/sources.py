"""Data sets by name: clip_benchmark's (built by that package), its wds/... form, and the embedded scenes; all in one shape.

A sample is an image with a label, with a list of captions, or with a question (vqa.py), or it is an object to be found again
(reid.py). An image that cannot be read does not end a run: it arrives as `Broken` and is counted. Class names and prompts come
with the data; JSON files of the user's own replace them. Several processes share the batches of one: every batch is made of the
same samples whoever reads it, and knows its place in the order.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import signal
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info, random_split

from tokensieve.data import reid, vqa
from tokensieve.data.images import BrokenImage, open_image
from tokensieve.errors import UserError, nearest
from tokensieve.results import digest, stamp

CLASSIFY, RETRIEVE, SELECT = "zeroshot_classification", "zeroshot_retrieval", "image_caption_selection"
ANSWER, FIND = "vqa", "reid"
CAPTION_TASKS = (RETRIEVE, SELECT, "captioning")  # the others need labels
EMBEDDED = {  # what --task auto means for each
    "embedded": CLASSIFY,
    "embedded-heldout": CLASSIFY,
    "embedded-captions": RETRIEVE,
    "embedded-selection": SELECT,
}
# clip_benchmark chooses by a chain of ifs and keeps no list; these are its names in 1.6.2 besides the prefixes.
_CLASSIFICATION = """
    cifar10 cifar100 imagenet1k imagenet-w babel_imagenet imagenet1k-unverified imagenetv2 imagenet_sketch imagenet-a
    imagenet-r imagenet-o objectnet voc2007 voc2007_multilabel food101 sun397 cars fgvc_aircraft dtd pets caltech101
    flowers mnist stl10 eurosat gtsrb country211 pcam renderedsst2 fer2013 dummy
"""
_CAPTIONS = """
    mscoco_captions multilingual_mscoco_captions crossmodal3600 xtd10 xtd200 flickr30k-200 flickr30k flickr8k winoground
    sugar_crepe/add_att sugar_crepe/add_obj sugar_crepe/replace_att sugar_crepe/replace_obj sugar_crepe/replace_rel
    sugar_crepe/swap_att sugar_crepe/swap_obj
"""
CLASSIFICATION, CAPTIONS = tuple(_CLASSIFICATION.split()), tuple(_CAPTIONS.split())
PREFIXES = ("wds/", "tfds/", "vtab/")
HOSTS = ("huggingface.co", "github.com", "image-net.org", "pytorch.org")  # if none of them answers, there is no network
IMAGE_SUFFIXES = ("webp", "png", "jpg", "jpeg")

Inputs = Any  # images: Tensor (B,3,h,w), or (B,n,3,h,w) with n a sample; or tensors by name, as a processor makes them
Templates = Sequence[str] | Mapping[str, Sequence[str]]


class Broken(NamedTuple):
    """Stands in for a sample that could not be read."""

    name: str
    reason: str
    fatal: bool = False  # what comes after it cannot be read either


class Batch(NamedTuple):
    """What the loader gives: the readable samples of one batch (images and targets are None if there are none), and the others.

    targets: (B,) or (B,C), or B lists of captions, or what the source's `join` makes of them
    """

    images: Inputs | None
    targets: Any
    broken: list[Broken]
    number: int  # the batch's place in the order of a single process, which may leave numbers out
    samples: Tensor  # (B,) int64, one number for each sample, the same whoever reads it and however


def stacked(images: Sequence[Tensor], targets: Sequence[Any]) -> tuple[Tensor, Any]:
    """Images (B,3,h,w) or (B,n,3,h,w), and labels (B,) or (B,C) or B lists of captions."""
    return torch.stack(list(images)), list(targets) if isinstance(targets[0], list) else default_collate(list(targets))


@dataclass
class Source:
    """A data set ready to be read: samples are (image tensor, label or list of captions), or what `join` takes, or Broken."""

    samples: Dataset[Any] | Stream
    classes: list[str]
    templates: Templates
    fingerprint: str
    most_workers: int | None = None  # more processes than this would stand idle
    captions: bool = False
    join: Callable[[Sequence[Any], Sequence[Any]], tuple[Inputs, Any]] = stacked  # the samples of a batch as one

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    @property
    def size(self) -> int | None:
        """The number of samples; None where only reading tells."""
        return None if isinstance(self.samples, Stream) else len(self)

    def workers(self, wanted: int) -> int:
        """The processes that will read, if so many are wanted."""
        return min(wanted, os.cpu_count() or 1, wanted if self.most_workers is None else self.most_workers)

    def loader(self, batch_size: int, num_workers: int, pin: bool = False, rank: int = 0, world: int = 1) -> DataLoader[Batch]:
        """The batches of one of several processes, in the data set's order, that of a stream being made by its workers.

        All processes together read every batch once, and each batch is what a single process with so many workers would read.
        """
        batches: Dataset[Batch]
        if isinstance(self.samples, Stream):
            batches = _StreamBatches(self.samples, batch_size, rank, world, self.join)
        else:
            batches = _Batches(self.samples, batch_size, rank, world, self.join)
        return DataLoader(
            batches,
            batch_size=None,
            num_workers=self.workers(num_workers),
            collate_fn=_as_it_is,
            pin_memory=pin,
            worker_init_fn=_leave_signals_to_the_parent,
        )

    def divided(self, proportion: float, generator: torch.Generator) -> tuple[Source, Source]:
        """The samples in two random parts, the second of that proportion; sizes and draws are torch's random_split's."""
        if isinstance(self.samples, Stream):
            raise UserError(
                "a stream of shards has no length to take --val_proportion of: give --val_split with a split of it."
            )
        if not 0 < proportion < 1:
            raise UserError(f"--val_proportion {proportion}: it must be above 0 and below 1, 0.1 say.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an empty part is an error here
            parts: list[Any] = random_split(range(len(self)), [1 - proportion, proportion], generator)  # type: ignore[arg-type]
        if not all(map(len, parts)):
            raise UserError(f"--val_proportion {proportion} of {len(self)} images leaves nothing to train or to validate on.")
        first, second = (
            replace(
                self,
                samples=_Chosen(self.samples, part.indices),
                fingerprint=digest([self.fingerprint, list(part.indices)]),
            )
            for part in parts
        )
        return first, second


# ----------------------------------------------------------------------------------------------------------------- names


def read_list(path: str, flag: str) -> list[str]:
    """The lines of a text file that a flag names."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {path} is not a text file with one name a line: {error}.") from error


def names(given: Sequence[str] | None) -> list[str]:
    """The data sets of a run: names, collections, and text files with a name a line, in order; unknown ones are errors."""
    found: list[str] = []
    for name in given or ["embedded"]:
        if os.path.isfile(name):
            found.extend(line.strip() for line in read_list(name, "--dataset") if line.strip())
        elif name in EMBEDDED or name in CLASSIFICATION or own_task(name):
            found.append(name)
        else:
            from clip_benchmark.datasets.builder import dataset_collection

            found.extend(dataset_collection.get(name, [name]))
    for name in found:
        check(name)
    return found


def check(name: str) -> None:
    """A UserError if nothing of that name is known."""
    known = (*EMBEDDED, *CLASSIFICATION, *CAPTIONS, *vqa.NAMES, *reid.NAMES)
    if name not in known and not name.startswith((*PREFIXES, vqa.PREFIX)):
        written = {word.lower(): word for word in known}  # some names have capitals
        meant = nearest(name, known) or written.get(nearest(name.lower(), written) or "")
        raise UserError(
            f"there is no data set {name!r}.{f' Did you mean {meant!r}?' if meant else ''} Known: {', '.join(known)}, "
            f"and wds/NAME, tfds/NAME, vtab/NAME, jsonl:FILE (questions)."
        )


def own_task(name: str) -> str | None:
    """The task of data that no other task can use: questions, and objects to be found again; None for other data."""
    if name in vqa.NAMES or name.startswith(vqa.PREFIX):
        return ANSWER
    return FIND if name in reid.NAMES else None


def task_of(name: str) -> str:
    """The task that --task auto means for this data set."""
    if own := own_task(name):
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


# -------------------------------------------------------------------------------------------------------------- building


def folder_of(name: str, root: str) -> str:
    """--dataset_root with the data set's name filled in."""
    short = name.removeprefix("wds/")
    try:
        return root.format(dataset=short, dataset_cleaned=short.replace("/", "-"))
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"--dataset_root {root!r} may only hold {{dataset}} and {{dataset_cleaned}}.") from error


def build(
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
            _check_caption_files(name, folder, split, language, annotation_file)
        given = _from_package(
            name, transform, folder, split, language, wds_cache_dir, custom_template_file, task, annotation_file
        )
        if name.startswith("wds/"):
            source = _webdataset(given, transform, wds_cache_dir)
            _check_task(name, source.captions, task)
        elif name in CAPTIONS and name != "winoground":
            source = _captioned(given, transform, name, folder, split, language)
        else:
            source = _guarded(given, name, folder, split)

    if task == CLASSIFY:
        keys = [name, short.removeprefix("tfds/").removeprefix("vtab/")]
        classes = _chosen(custom_classname_file, "--custom_classname_file", keys)
        templates = _chosen(custom_template_file, "--custom_template_file", [*keys, "imagenet1k"])
        source.classes = list(classes or source.classes)
        source.templates = templates or source.templates
        if not source.classes or not source.templates:
            what = "class names" if not source.classes else "prompt templates"
            raise UserError(f"{name} has no {what}: give --custom_classname_file and --custom_template_file.")
        source.fingerprint = digest([source.fingerprint, source.classes, source.templates])
    source = first(source, limit)
    if source.size == 0:
        raise UserError(f"the data set {name} is empty (split {split!r} under {folder!r}).")
    return source


def first(source: Source, limit: int | None) -> Source:
    """The first samples of it; without a limit all of them."""
    if limit is None:
        return source
    mark = digest([source.fingerprint, limit])
    if isinstance(source.samples, Stream):
        return replace(source, samples=_FirstStreamed(source.samples, limit), most_workers=1, fingerprint=mark)
    return replace(source, samples=_Chosen(source.samples, range(min(limit, len(source)))), fingerprint=mark)


def _embedded(name: str, transform: Callable[[Any], Tensor], split: str, language: str) -> Source:
    from tokensieve.data import embedded

    if language != "en":
        raise UserError(f"{name} is in 'en' only, not in {language!r}.")
    mark = [name, split]  # drawn by code from fixed seeds, and the code is in the key of every result already
    if EMBEDDED[name] in CAPTION_TASKS:
        made = embedded.EmbeddedCaptions if EMBEDDED[name] == RETRIEVE else embedded.EmbeddedSelection
        pictures: Any = made(split, transform=transform)
        return Source(pictures, [], [], digest([*mark, len(pictures)]), captions=True)
    scenes = embedded.EmbeddedScenes(split, pairs="heldout" if name == "embedded-heldout" else "seen", transform=transform)
    return Source(scenes, list(scenes.classes), list(scenes.templates), digest([*mark, len(scenes)]))


def _check_caption_files(name: str, folder: str, split: str, language: str, annotation_file: str) -> None:
    """A UserError if what clip_benchmark would fetch is not there and there is no network.

    It fetches by shell commands that report no failure and leave empty files behind.
    """
    from tokensieve.models.load import reachable

    if annotation_file and not os.path.isfile(annotation_file):
        raise UserError(f"--annotation_file {annotation_file}: there is no such file.")
    suffix = {"en": "karpathy", "zh": "zh"}.get(language, language)
    images, captions = "", ""
    if name == "mscoco_captions":
        images, captions = "train2014" if split == "train" else "val2014", f"coco_{split}_karpathy.json"
    elif name in ("flickr30k", "flickr8k"):
        captions = f"{name}_{split}_{suffix}.txt"
    elif name.startswith("sugar_crepe/"):
        images, captions = "val2017", f"{name.split('/')[1]}.json"
    elif name != "winoground":
        file = {"multilingual_mscoco_captions": name, "crossmodal3600": "crossmodal3600_captions"}.get(name, name)
        captions = f"{file.replace('flickr30k-200', 'flickr30k_200')}-{language}.json"
    needed = [os.path.join(folder, images), annotation_file or os.path.join(folder, captions)]
    missing = [path for path in needed if not os.path.exists(path)]
    offline = "embedded-selection" if task_of(name) == SELECT else "embedded-captions"
    if missing and not reachable(*HOSTS):
        raise UserError(
            f"the data set {name} needs {missing[0]} and there is no network to download it. Give --dataset_root with the "
            f"folder that holds it, or use --dataset {offline}."
        )


def _from_package(
    name: str,
    transform: Callable[[Any], Tensor],
    folder: str,
    split: str,
    language: str,
    wds_cache_dir: str | None,
    custom_template_file: str | None,
    task: str,
    annotation_file: str,
) -> Any:
    """clip_benchmark's own data set object; whatever goes wrong there becomes one line."""
    from clip_benchmark.datasets import builder

    from tokensieve.models.load import reachable

    downloads = not name.startswith("wds/") and name != "dummy"
    prompted = task == CLASSIFY and not name.startswith("wds/")
    if prompted:
        prompts = Path(builder.__file__).parent.glob("*_zeroshot_classification_templates.json")
        languages = sorted(path.name.split("_")[0] for path in prompts)
        if language not in languages and name not in ("babel_imagenet", "dummy") and not custom_template_file:
            raise UserError(f"{name} has prompts in {', '.join(languages)}, not in {language!r}: give --custom_template_file.")
    if name.startswith("wds/") and "://" not in folder:
        count = os.path.join(folder, split, "nshards.txt")
        if not os.path.isfile(count):
            raise UserError(
                f"{name}: there is no {count}. Give --dataset_root with the folder that holds {split}/nshards.txt, "
                f"{split}/0.tar, ... and classnames.txt, or another --split."
            )

    def built(download: bool) -> Any:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"WebDataset\(shardshuffle")  # only the shard list is taken from it
            return builder.build_dataset(
                name,
                root=folder,
                transform=transform,
                split=split,
                download=download,
                annotation_file=annotation_file,
                # labels need no prompts, but some class lists of the package come with those of a language
                language=language if (prompted and name != "dummy") or name in (*CAPTIONS, "babel_imagenet") else "en",
                task=CLASSIFY if name not in CAPTIONS and not name.startswith("wds/") else RETRIEVE,
                wds_cache_dir=wds_cache_dir,
                custom_template_file=custom_template_file if prompted else None,
            )

    try:
        if wds_cache_dir:
            os.makedirs(wds_cache_dir, exist_ok=True)  # webdataset asks for it to be there
        if not downloads:
            return built(download=False)
        if os.path.exists(folder):
            try:
                return built(download=False)
            except (OSError, RuntimeError) as error:  # not there yet, or not all of it
                if not reachable(*HOSTS):
                    raise RuntimeError(f"{error} There is no network to download it.") from error
        elif not reachable(*HOSTS):
            raise UserError(
                f"the data set {name} is not in {folder!r} (--dataset_root) and there is no network to download it. "
                f"Give the folder that holds it, or use --dataset embedded."
            )
        return built(download=True)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{name} needs the package {error.name or error}: pip install {error.name or '...'}") from error
    except (AssertionError, OSError, RuntimeError, ValueError, KeyError, TypeError, SystemExit) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read the data set {name} in {folder!r} (--dataset_root), split {split!r}: {reason}") from error


def _chosen(path: str | None, flag: str, keys: Sequence[str]) -> Any:
    """The entry of a JSON file by the first of these names it has; a bare file name may be one in clip_benchmark's folder."""
    if not path:
        return None
    file = Path(path)
    if not file.exists():
        import clip_benchmark.datasets

        file = Path(clip_benchmark.datasets.__file__).parent / path
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{flag} {path} is not JSON: {error}.") from error
    for key in keys:
        if isinstance(content, dict) and key in content:
            return content[key]
    raise UserError(f'{flag} {path} has no entry for {keys[0]!r}; it must be {{"{keys[0]}": [...]}}.')


# -------------------------------------------------------------------------------------------------- samples, one way or other


def _guarded(given: Any, name: str, folder: str, split: str) -> Source:
    classes, templates = list(getattr(given, "classes", None) or []), getattr(given, "templates", None) or []
    mark: list[Any] = [name, split]
    if isinstance(given, IterableDataset):
        return Source(_Foreign(given), classes, templates, digest([*mark, folder]))
    if hasattr(given, "loader") and hasattr(given, "samples"):  # an image folder
        given.loader = open_image
        mark.append([(os.path.relpath(path, folder), label, *stamp(path)) for path, label in given.samples])
    else:
        files = sorted(os.path.join(place, file) for place, _, inside in os.walk(folder) for file in inside)
        mark.extend([len(given), *((os.path.relpath(file, folder), *stamp(file)) for file in files)])
    return Source(Guarded(given), classes, templates, digest(mark), captions=name in CAPTIONS)


def _captioned(given: Any, transform: Callable[[Any], Tensor], name: str, folder: str, split: str, language: str) -> Source:
    """The image files and captions of one of clip_benchmark's caption sets, read here so that a broken image is counted."""
    if hasattr(given, "coco"):
        files = [os.path.join(given.root, given.coco.loadImgs(key)[0]["file_name"]) for key in given.ids]
        captions = [[entry["caption"] for entry in given.coco.imgToAnns[key]] for key in given.ids]
    elif hasattr(given, "ann"):
        entries = [given.ann[key] for key in given.idx_strings]
        files = [os.path.join(given.root, entry["filename"]) for entry in entries]
        captions = [[entry["caption"], entry["negative_caption"]] for entry in entries]
    else:  # flickr's files are under the root, with several captions; the others' are whole paths with one caption
        files = [os.path.join(given.root, file) if isinstance(told, list) else file for file, told in given.data]
        captions = [told if isinstance(told, list) else [told] for _, told in given.data]
    stamps = [(os.path.relpath(file, folder), *stamp(file)) for file in files]
    mark = digest([name, split, language, stamps, captions])
    return Source(Captioned(files, captions, transform), [], [], mark, captions=True)


class Guarded(Dataset[Any]):
    """A data set whose unreadable images come as Broken instead of an exception."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.given[index]
        except (BrokenImage, OSError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            samples = getattr(self.given, "samples", None)
            return Broken(str(samples[index][0]) if samples else f"sample {index}", str(error))


class Captioned(Dataset[Any]):
    """Image files with their captions."""

    def __init__(self, files: Sequence[str], captions: Sequence[list[str]], transform: Callable[[Any], Tensor]) -> None:
        self.files, self.captions, self.transform = files, captions, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        if not self.captions[index]:
            return Broken(self.files[index], "it has no caption")
        try:
            return self.transform(open_image(self.files[index])), self.captions[index]
        except BrokenImage as error:
            return Broken(self.files[index], str(error))


class _Chosen(Dataset[Any]):
    """Some samples of a data set, which keep their numbers there."""

    def __init__(self, given: Any, indices: Sequence[int]) -> None:
        inner = isinstance(given, _Chosen)
        self.given = given.given if inner else given
        self.indices = [given.indices[index] for index in indices] if inner else indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.given[self.indices[index]]


class Stream:
    """Samples that come one after another, found first and decoded later: those of another process need not be decoded."""

    def found(self) -> Iterator[tuple[int, Any]]:
        """This worker's samples, still encoded, each with its number."""
        raise NotImplementedError

    def decoded(self, sample: Any) -> Any:
        """The sample as (image tensor, target), or Broken."""
        raise NotImplementedError


class _FirstStreamed(Stream):
    """The first samples of a stream, in the order of a single worker."""

    def __init__(self, given: Stream, limit: int) -> None:
        self.given, self.limit = given, limit

    def found(self) -> Iterator[tuple[int, Any]]:
        return itertools.islice(self.given.found(), self.limit)

    def decoded(self, sample: Any) -> Any:
        return self.given.decoded(sample)


class _Foreign(Stream):
    """A stream of another package, which decodes as it goes; its workers take every so-manieth sample."""

    def __init__(self, given: Iterable[Any]) -> None:
        self.given = given

    def found(self) -> Iterator[tuple[int, Any]]:
        worker, workers = _worker()
        return ((place * workers + worker, sample) for place, sample in enumerate(self.given))

    def decoded(self, sample: Any) -> Any:
        return sample


def _webdataset(given: Any, transform: Callable[[Any], Tensor], cache_dir: str | None) -> Source:
    """The same shards as clip_benchmark's pipeline, decoded here: no pickles, and a broken image is counted."""
    import webdataset

    shards = [shard if isinstance(shard, str) else shard["url"] for shard in given.pipeline[0].urls]
    for shard in shards:
        if "://" not in shard:
            _check_shard(shard, len(shards))
    pipeline = webdataset.WebDataset(
        shards, cache_dir=cache_dir, shardshuffle=False, nodesplitter=_every_shard, empty_check=False
    )
    mark = digest([(os.path.basename(shard), *stamp(shard)) if os.path.isfile(shard) else shard for shard in shards])
    captions = (
        str.splitlines in given.pipeline[-1].args
    )  # what clip_benchmark does to the text if dataset_type.txt says retrieval
    stream = WebSamples(pipeline, transform, captions)
    classes, templates = list(given.classes or []), given.templates or []
    return Source(stream, classes, templates, mark, most_workers=len(shards), captions=captions)


def _check_shard(shard: str, total: int) -> None:
    """A UserError if the shard is not there or cut off, which a tar stream would pass over in silence."""
    if not os.path.isfile(shard):
        raise UserError(f"the shard {shard} is missing, though nshards.txt counts {total}.")
    with open(shard, "rb") as file:
        file.seek(max(0, os.path.getsize(shard) - 1024))
        if file.read() != bytes(1024):  # two empty blocks end every tar file
            raise UserError(f"the shard {shard} is damaged or cut off: it has not the end of a tar file. Fetch it again.")


def _every_shard(shards: Iterable[Any]) -> Iterable[Any]:
    return shards


class WebSamples(Stream):
    """Samples of webdataset shards: an image (webp, png, jpg, jpeg) and `cls` (a number), `npy` (several labels) or `txt`."""

    def __init__(self, pipeline: Any, transform: Callable[[Any], Tensor], captions: bool) -> None:
        self.pipeline, self.transform, self.captions = pipeline, transform, captions

    def found(self) -> Iterator[tuple[int, Any]]:
        try:
            for sample in self.pipeline:
                name = f"{os.path.basename(sample['__url__'])}/{sample['__key__']}"
                yield int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2, sample
        except (tarfile.TarError, EOFError, OSError) as error:  # raised here, it would lose its type between processes
            yield 0, Broken("a shard", " ".join(str(part) for part in error.args), fatal=True)

    def decoded(self, sample: Any) -> Any:
        if isinstance(sample, Broken):
            return sample
        name = str(sample["__key__"])
        content = next((sample[suffix] for suffix in IMAGE_SUFFIXES if suffix in sample), None)
        if content is None:
            return Broken(name, f"no image among {', '.join(key for key in sample if not key.startswith('__'))}")
        try:
            target = self._target(sample)
            return self.transform(open_image(io.BytesIO(content))), target
        except (BrokenImage, KeyError, ValueError) as error:
            return Broken(name, f"{type(error).__name__}: {error}")

    def _target(self, sample: Mapping[str, bytes]) -> Any:
        if self.captions:
            captions = sample["txt"].decode("utf-8").splitlines()
            if not captions:
                raise ValueError("it has no caption")
            return captions
        if "npy" in sample:
            return torch.from_numpy(np.load(io.BytesIO(sample["npy"]), allow_pickle=False))
        return int(sample["cls"])


# --------------------------------------------------------------------------------------------------------------- batches


class _Batches(Dataset[Batch]):
    """One process's batches of a data set with a length: the process takes its turn with the others, batch by batch."""

    def __init__(self, samples: Any, size: int, rank: int, world: int, join: Any) -> None:
        self.samples, self.size, self.join = samples, size, join
        self.numbers = range(rank, -(-len(samples) // size), world)
        self.names = samples.indices if isinstance(samples, _Chosen) else range(len(samples))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Batch:
        number = self.numbers[place]
        indices = range(number * self.size, min((number + 1) * self.size, len(self.samples)))
        names = [self.names[index] for index in indices]
        return collate([self.samples[index] for index in indices], number, names, self.join)


class _StreamBatches(IterableDataset[Batch]):
    """One process's batches of a stream: of every worker's batches the process takes its turn, and does not decode the others.

    A DataLoader asks its workers in turn, so (turn, worker) is the order in which a single process would get them.
    """

    def __init__(self, samples: Stream, size: int, rank: int, world: int, join: Any) -> None:
        self.samples, self.size, self.rank, self.world, self.join = samples, size, rank, world, join

    def __iter__(self) -> Iterator[Batch]:
        worker, workers = _worker()
        found = self.samples.found()
        for turn in itertools.count():
            chunk = list(itertools.islice(found, self.size))
            if not chunk:
                return
            fatal = any(isinstance(sample, Broken) and sample.fatal for _, sample in chunk)  # every process must hear of it
            if turn % self.world == self.rank or fatal:
                names, samples = zip(*chunk, strict=True)
                decoded = [self.samples.decoded(sample) for sample in samples]
                yield collate(decoded, turn * workers + worker, names, self.join)


def _worker() -> tuple[int, int]:
    """Which one of how many reading processes this is."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def collate(samples: Sequence[Any], number: int, names: Sequence[int], join: Any = stacked) -> Batch:
    """One batch of the readable samples, and the list of the others."""
    broken = [sample for sample in samples if isinstance(sample, Broken)]
    readable = [(name, *sample) for name, sample in zip(names, samples, strict=True) if not isinstance(sample, Broken)]
    if not readable:
        return Batch(None, None, broken, number, torch.empty(0, dtype=torch.int64))
    kept, images, targets = zip(*readable, strict=True)
    try:
        joined, labels = join(images, targets)
    except RuntimeError as error:  # torch's word for tensors that cannot be stacked
        reason = f"its images or its labels differ in shape ({error})"
        return Batch(None, None, [Broken("a batch", reason, fatal=True)], number, torch.empty(0, dtype=torch.int64))
    return Batch(joined, labels, broken, number, torch.tensor(kept))


def _as_it_is(batch: Any) -> Any:
    return batch


def _leave_signals_to_the_parent(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
