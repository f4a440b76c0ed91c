"""Data sets by name: clip_benchmark's (built by that package), its wds/... form, and the embedded scenes; all in one shape.

An image that cannot be read does not end a run: it arrives as `Broken` and is counted. Class names and prompts come with
the data; JSON files of the user's own replace them.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import signal
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from tokensieve.data.images import BrokenImage, open_image
from tokensieve.errors import UserError, did_you_mean
from tokensieve.results import digest

EMBEDDED = ("embedded", "embedded-heldout")
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

Templates = Sequence[str] | Mapping[str, Sequence[str]]


class Broken(NamedTuple):
    """Stands in for a sample that could not be read."""

    name: str
    reason: str
    fatal: bool = False  # what comes after it cannot be read either


class Batch(NamedTuple):
    """What the loader gives: images (B,3,h,w), targets (B,) or (B,C), both None if all were broken, and the broken ones."""

    images: Tensor | None
    targets: Tensor | None
    broken: list[Broken]


@dataclass
class Source:
    """A data set ready to be read: samples are (image tensor, target) or Broken."""

    samples: Dataset[Any]
    classes: list[str]
    templates: Templates
    fingerprint: str
    most_workers: int | None = None  # more processes than this would stand idle

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    @property
    def size(self) -> int | None:
        """The number of samples; None where only reading tells."""
        return None if isinstance(self.samples, IterableDataset) else len(self)

    def workers(self, wanted: int) -> int:
        """The processes that will read, if so many are wanted."""
        return min(wanted, os.cpu_count() or 1, wanted if self.most_workers is None else self.most_workers)

    def loader(self, batch_size: int, num_workers: int, pin: bool = False) -> DataLoader[Batch]:
        """Batches in the data set's order; that of a stream depends on how many workers share its shards."""
        return DataLoader(
            self.samples,
            batch_size=batch_size,
            num_workers=self.workers(num_workers),
            collate_fn=collate,
            pin_memory=pin,
            worker_init_fn=_leave_signals_to_the_parent,
        )


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
    for name in given or [EMBEDDED[0]]:
        if os.path.isfile(name):
            found.extend(line.strip() for line in read_list(name, "--dataset") if line.strip())
        elif name in EMBEDDED or name in CLASSIFICATION:
            found.append(name)
        else:
            from clip_benchmark.datasets.builder import dataset_collection

            found.extend(dataset_collection.get(name, [name]))
    for name in found:
        check(name)
    return found


def check(name: str) -> None:
    """A UserError if nothing of that name is known."""
    known = (*EMBEDDED, *CLASSIFICATION, *CAPTIONS)
    if name not in known and not name.startswith(PREFIXES):
        raise UserError(
            f"there is no data set {name!r}.{did_you_mean(name, known)} Known: {', '.join((*EMBEDDED, *CLASSIFICATION))}, "
            f"and wds/NAME, tfds/NAME, vtab/NAME."
        )


def task_of(name: str) -> str:
    """The task that --task auto means for this data set."""
    if name in EMBEDDED:
        return "zeroshot_classification"
    from clip_benchmark.datasets.builder import get_dataset_default_task

    return str(get_dataset_default_task(name.removeprefix("wds/")))


# -------------------------------------------------------------------------------------------------------------- building


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
) -> Source:
    """The data set of that name for zero-shot classification.

    root may hold {dataset} and {dataset_cleaned}. limit: only the first samples.
    """
    short = name.removeprefix("wds/")
    try:
        folder = root.format(dataset=short, dataset_cleaned=short.replace("/", "-"))
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"--dataset_root {root!r} may only hold {{dataset}} and {{dataset_cleaned}}.") from error

    keys = [name, short.removeprefix("tfds/").removeprefix("vtab/")]
    classes = _chosen(custom_classname_file, "--custom_classname_file", keys)
    templates = _chosen(custom_template_file, "--custom_template_file", [*keys, "imagenet1k"])
    if name in EMBEDDED:
        source = _embedded(name, transform, split, language)
    else:
        given = _from_package(name, transform, folder, split, language, wds_cache_dir, custom_template_file)
        if name.startswith("wds/"):
            source = _webdataset(given, transform, wds_cache_dir)
        else:
            source = _guarded(given, name, folder, split)

    source.classes = list(classes or source.classes)
    source.templates = templates or source.templates
    if not source.classes or not source.templates:
        what = "class names" if not source.classes else "prompt templates"
        raise UserError(f"{name} has no {what}: give --custom_classname_file and --custom_template_file.")
    if limit is not None:
        if isinstance(source.samples, IterableDataset):
            source.samples, source.most_workers = _FirstStreamed(source.samples, limit), 1
        else:
            source.samples = _First(source.samples, limit)
    if source.size == 0:
        raise UserError(f"the data set {name} is empty (split {split!r} under {folder!r}).")
    source.fingerprint = digest([source.fingerprint, source.classes, source.templates, limit])
    return source


def _embedded(name: str, transform: Callable[[Any], Tensor], split: str, language: str) -> Source:
    from tokensieve.data.embedded import EmbeddedScenes

    if language != "en":
        raise UserError(f"{name} has prompts in 'en' only, not in {language!r}.")
    scenes = EmbeddedScenes(split, pairs="heldout" if name == "embedded-heldout" else "seen", transform=transform)
    mark = digest([name, split, len(scenes)])  # drawn by code from fixed seeds, and the code is in the key already
    return Source(scenes, list(scenes.classes), list(scenes.templates), mark)


def _from_package(
    name: str,
    transform: Callable[[Any], Tensor],
    folder: str,
    split: str,
    language: str,
    wds_cache_dir: str | None,
    custom_template_file: str | None,
) -> Any:
    """clip_benchmark's own data set object; whatever goes wrong there becomes one line."""
    from clip_benchmark.datasets import builder

    from tokensieve.models.load import reachable

    downloads = not name.startswith("wds/") and name != "dummy"
    if downloads:
        prompts = Path(builder.__file__).parent.glob("*_zeroshot_classification_templates.json")
        languages = sorted(path.name.split("_")[0] for path in prompts)
        if language not in languages and name != "babel_imagenet" and not custom_template_file:
            raise UserError(f"{name} has prompts in {', '.join(languages)}, not in {language!r}: give --custom_template_file.")
    elif name != "dummy" and "://" not in folder:
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
                language=language if name != "dummy" else "en",
                wds_cache_dir=wds_cache_dir,
                custom_template_file=custom_template_file,
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
    classes, templates = list(given.classes or []), given.templates
    mark: list[Any] = [name, split]
    if isinstance(given, IterableDataset):
        return Source(given, classes, templates, digest([*mark, folder]))
    if hasattr(given, "loader") and hasattr(given, "samples"):  # an image folder
        given.loader = open_image
        mark.append([(os.path.relpath(path, folder), label, *_stamp(path)) for path, label in given.samples])
    else:
        there = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        mark.extend([len(given), *((entry, *_stamp(os.path.join(folder, entry))) for entry in there)])
    return Source(Guarded(given), classes, templates, digest(mark))


def _stamp(path: str) -> tuple[int, int]:
    """Size and time of a file: what changes when its content does, without reading it."""
    about = os.lstat(path)
    return about.st_size, about.st_mtime_ns


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


class _First(Dataset[Any]):
    """The first samples of a data set."""

    def __init__(self, given: Any, limit: int) -> None:
        self.given, self.limit = given, min(limit, len(given))

    def __len__(self) -> int:
        return self.limit

    def __getitem__(self, index: int) -> Any:
        return self.given[index]


class _FirstStreamed(IterableDataset[Any]):
    """The first samples of a stream."""

    def __init__(self, given: Iterable[Any], limit: int) -> None:
        self.given, self.limit = given, limit

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.given), self.limit)


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
    mark = digest([(os.path.basename(shard), *_stamp(shard)) if os.path.isfile(shard) else shard for shard in shards])
    stream = WebSamples(pipeline, transform)
    return Source(stream, list(given.classes or []), given.templates, mark, most_workers=len(shards))


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


class WebSamples(IterableDataset[Any]):
    """Samples of webdataset shards: an image (webp, png, jpg, jpeg) and `cls` (a number) or `npy` (several labels)."""

    def __init__(self, pipeline: Any, transform: Callable[[Any], Tensor]) -> None:
        self.pipeline, self.transform = pipeline, transform

    def __iter__(self) -> Iterator[Any]:
        try:
            for sample in self.pipeline:
                yield self._decoded(sample)
        except (tarfile.TarError, EOFError, OSError) as error:  # raised here, it would lose its type between processes
            yield Broken("a shard", " ".join(str(part) for part in error.args), fatal=True)

    def _decoded(self, sample: Mapping[str, Any]) -> Any:
        name = str(sample["__key__"])
        content = next((sample[suffix] for suffix in IMAGE_SUFFIXES if suffix in sample), None)
        if content is None:
            return Broken(name, f"no image among {', '.join(key for key in sample if not key.startswith('__'))}")
        try:
            if "npy" in sample:
                target: Any = torch.from_numpy(np.load(io.BytesIO(sample["npy"]), allow_pickle=False))
            else:
                target = int(sample["cls"])
            return self.transform(open_image(io.BytesIO(content))), target
        except (BrokenImage, KeyError, ValueError) as error:
            return Broken(name, f"{type(error).__name__}: {error}")


def collate(samples: Sequence[Any]) -> Batch:
    """One batch of the readable samples, and the list of the others."""
    broken = [sample for sample in samples if isinstance(sample, Broken)]
    readable = [sample for sample in samples if not isinstance(sample, Broken)]
    if not readable:
        return Batch(None, None, broken)
    try:
        images, targets = default_collate(readable)
    except RuntimeError as error:  # default_collate's word for tensors that cannot be stacked
        return Batch(None, None, [Broken("a batch", f"its images or its labels differ in shape ({error})", fatal=True)])
    return Batch(images, targets, broken)


def _leave_signals_to_the_parent(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
