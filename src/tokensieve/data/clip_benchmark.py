"""TODO docstring."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from tokensieve.data.images import BrokenImage, open_image
from tokensieve.data.source import Broken, Source
from tokensieve.data.streams import OtherStream
from tokensieve.errors import UserError, one_line
from tokensieve.provenance import digest, file_stat

CLASSIFY, RETRIEVE, SELECT = "zeroshot_classification", "zeroshot_retrieval", "image_caption_selection"
CAPTION_TASKS = (RETRIEVE, SELECT, "captioning")  # the others need labels
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
HOSTS = ("huggingface.co", "github.com", "image-net.org", "pytorch.org")  # if none of them answers, there is no network


def check_caption_files(name: str, folder: str, split: str, language: str, annotation_file: str) -> None:
    """A UserError if what clip_benchmark would fetch is not there and there is no network.

    It fetches by shell commands that report no failure and leave empty files behind.
    """
    from tokensieve.models.loading.hub import reachable

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
    from tokensieve.data.registry import task_of

    offline = "embedded-selection" if task_of(name) == SELECT else "embedded-captions"
    if missing and not reachable(*HOSTS):
        raise UserError(
            f"the data set {name} needs {missing[0]} and there is no network to download it. Give --dataset_root with the "
            f"folder that holds it, or use --dataset {offline}."
        )


def open_dataset(
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

    from tokensieve.models.loading.hub import reachable

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
        reason = one_line(error, 300)
        raise UserError(f"cannot read the data set {name} in {folder!r} (--dataset_root), split {split!r}: {reason}") from error


def custom_texts(path: str | None, flag: str, keys: Sequence[str]) -> Any:
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


def checked_source(given: Any, name: str, folder: str, split: str) -> Source:
    classes, templates = list(getattr(given, "classes", None) or []), getattr(given, "templates", None) or []
    mark: list[Any] = [name, split]
    if isinstance(given, IterableDataset):
        return Source(OtherStream(given), classes, templates, digest([*mark, folder]))
    if hasattr(given, "loader") and hasattr(given, "samples"):  # an image folder
        given.loader = open_image
        mark.append([(os.path.relpath(path, folder), label, *file_stat(path)) for path, label in given.samples])
    else:
        files = sorted(os.path.join(place, file) for place, _, inside in os.walk(folder) for file in inside)
        mark.extend([len(given), *((os.path.relpath(file, folder), *file_stat(file)) for file in files)])
    return Source(CheckedDataset(given), classes, templates, digest(mark), captions=name in CAPTIONS)


def captioned_source(
    given: Any, transform: Callable[[Any], Tensor], name: str, folder: str, split: str, language: str
) -> Source:
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
    stamps = [(os.path.relpath(file, folder), *file_stat(file)) for file in files]
    mark = digest([name, split, language, stamps, captions])
    return Source(Captioned(files, captions, transform), [], [], mark, captions=True)


class CheckedDataset(Dataset[Any]):
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
