"""clip_benchmark's data sets as sources. An image that cannot be read does not end a run: it comes as `Broken`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from tokensieve.data.clip_benchmark import CAPTIONS, RETRIEVE, SELECT
from tokensieve.data.images import BrokenImage, open_image
from tokensieve.data.no_commands import CommandError, no_commands
from tokensieve.data.other_readers import our_images
from tokensieve.data.registry import CLASSIFY, SourceOptions, task_of
from tokensieve.data.source import Broken, Source
from tokensieve.data.streams import OtherStream
from tokensieve.errors import UserError, one_line, short
from tokensieve.installation.packages import missing_package
from tokensieve.models.loading import hub
from tokensieve.provenance import digest, file_stat

HOSTS = ("huggingface.co", "github.com", "image-net.org", "pytorch.org")  # if none of them answers, there is no network


def build_labels(name: str, transform: Callable[[Any], Tensor], options: SourceOptions) -> Source:
    """Images with labels."""
    return _checked_source(_open(name, transform, options), name, options)


def build_captions(name: str, transform: Callable[[Any], Tensor], options: SourceOptions) -> Source:
    """Images with captions; their files are read here, so that a broken image is counted."""
    _check_caption_files(name, options)
    dataset = _open(name, transform, options)
    if name == "winoground":  # it comes from the Hub, and has two images a sample
        return _checked_source(dataset, name, options)
    return _captioned_source(dataset, transform, name, options)


def _check_caption_files(name: str, options: SourceOptions) -> None:
    """A UserError if the images or captions are not there. clip_benchmark would fetch them by shell commands."""
    folder, split, language, annotation_file = options.folder, options.split, options.language, options.annotation_file
    if annotation_file and not os.path.isfile(annotation_file):
        raise UserError(f"--annotation_file {short(annotation_file, 200)}: there is no such file.")
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
    comes_from_hub = name == "winoground" and hub.reachable(*HOSTS)
    if missing and not comes_from_hub:
        raise UserError(
            f"the data set {name} needs {short(missing[0], 200)}, which is not fetched for you. Give --dataset_root with the "
            f"folder that holds it, or use --dataset {offline}."
        )


def _open(name: str, transform: Callable[[Any], Tensor], options: SourceOptions) -> Any:
    """clip_benchmark's own data set object; whatever goes wrong there becomes one line."""
    from clip_benchmark.datasets import builder

    folder, split, language, template_file = options.folder, options.split, options.language, options.custom_template_file
    prompted = options.needs_class_names
    if prompted:
        prompts = Path(builder.__file__).parent.glob("*_zeroshot_classification_templates.json")
        languages = sorted(path.name.split("_")[0] for path in prompts)
        if language not in languages and name not in ("babel_imagenet", "dummy") and not template_file:
            raise UserError(f"{name} has prompts in {', '.join(languages)}, not in {language!r}: give --custom_template_file.")

    def build(download: bool) -> Any:
        with contextlib.redirect_stdout(sys.stderr), no_commands():
            return builder.build_dataset(
                name,
                root=folder,
                transform=transform,
                split=split,
                download=download,
                annotation_file=options.annotation_file,
                # labels need no prompts, but some class lists of the package come with those of a language
                language=language if (prompted and name != "dummy") or name in (*CAPTIONS, "babel_imagenet") else "en",
                task=RETRIEVE if name in CAPTIONS else CLASSIFY,
                custom_template_file=template_file if prompted else None,
            )

    was_there = os.path.exists(folder)
    try:
        if name == "dummy":
            return build(download=False)
        if was_there:
            try:
                return build(download=False)
            except CommandError:
                raise
            except (OSError, RuntimeError) as error:  # not there yet, or not all of it
                if not hub.reachable(*HOSTS):
                    raise RuntimeError(f"{error} There is no network to download it.") from error
        elif not hub.reachable(*HOSTS):
            raise UserError(
                f"the data set {name} is not in {short(folder, 200)!r} (--dataset_root) and there is no network to download "
                f"it. Give the folder that holds it, or use --dataset embedded."
            )
        return build(download=True)
    except UserError:
        raise
    except CommandError as error:
        if not was_there:
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # made for the files that would have come
        raise UserError(
            f"{name} is not in {short(folder, 200)!r} (--dataset_root), and no program is started to fetch it. Place it there. "
            f"It comes from: {one_line(error, 200)}"
        ) from error
    except ImportError as error:
        needed = missing_package(error) or UserError(
            f"{name} needs the package {error.name}: pip install {error.name or '...'}"
        )
        raise needed from error
    except (AssertionError, OSError, RuntimeError, ValueError, KeyError, TypeError, SystemExit) as error:
        reason = one_line(error, 300)
        where = f"{short(folder, 200)!r} (--dataset_root), split {short(split)!r}"
        raise UserError(f"cannot read the data set {name} in {where}: {short(reason, 300)}") from error


def _checked_source(dataset: Any, name: str, options: SourceOptions) -> Source:
    folder = options.folder
    classes, templates = list(getattr(dataset, "classes", None) or []), getattr(dataset, "templates", None) or []
    identity: list[Any] = [name, options.split]
    if isinstance(dataset, IterableDataset):
        return Source(OtherStream(dataset), classes, templates, digest([*identity, folder]))
    if hasattr(dataset, "loader") and hasattr(dataset, "samples"):  # an image folder
        dataset.loader = open_image  # torchvision's own opens the file itself
        identity.append([(os.path.relpath(path, folder), label, *file_stat(path)) for path, label in dataset.samples])
    else:
        files = sorted(os.path.join(parent, file) for parent, _, inside in os.walk(folder) for file in inside)
        identity.extend([len(dataset), *((os.path.relpath(file, folder), *file_stat(file)) for file in files)])
    return Source(CheckedDataset(dataset), classes, templates, digest(identity), captions=name in CAPTIONS)


def _captioned_source(dataset: Any, transform: Callable[[Any], Tensor], name: str, options: SourceOptions) -> Source:
    """The image files and captions of one of clip_benchmark's data sets."""
    if hasattr(dataset, "coco"):
        files = [os.path.join(dataset.root, dataset.coco.loadImgs(key)[0]["file_name"]) for key in dataset.ids]
        captions = [[entry["caption"] for entry in dataset.coco.imgToAnns[key]] for key in dataset.ids]
    elif hasattr(dataset, "ann"):
        entries = [dataset.ann[key] for key in dataset.idx_strings]
        files = [os.path.join(dataset.root, entry["filename"]) for entry in entries]
        captions = [[entry["caption"], entry["negative_caption"]] for entry in entries]
    else:  # flickr's files are under the root, with several captions; the others' are whole paths with one caption
        files = [os.path.join(dataset.root, file) if isinstance(texts, list) else file for file, texts in dataset.data]
        captions = [texts if isinstance(texts, list) else [texts] for _, texts in dataset.data]
    stats = [(os.path.relpath(file, options.folder), *file_stat(file)) for file in files]
    fingerprint = digest([name, options.split, options.language, stats, captions])
    return Source(Captioned(files, captions, transform), [], [], fingerprint, captions=True)


class CheckedDataset(Dataset[Any]):
    """A data set whose unreadable images come as Broken instead of an exception."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            with our_images():
                return self.dataset[index]
        except Exception as error:  # what another package's reader raises for a damaged image is anything
            samples = getattr(self.dataset, "samples", None)
            kind = "" if isinstance(error, BrokenImage) else f"{type(error).__name__}: "
            return Broken(str(samples[index][0]) if samples else f"sample {index}", f"{kind}{short(error, 300)}")


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
