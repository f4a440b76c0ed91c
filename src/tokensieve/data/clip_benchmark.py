"""Declares clip_benchmark's data sets: its names, and the prefixes wds/, tfds/ and vtab/. This module imports no torch."""

from __future__ import annotations

from tokensieve.data.registry import CLASSIFY, DATASETS, DatasetSpec

RETRIEVE, SELECT = "zeroshot_retrieval", "image_caption_selection"
# clip_benchmark chooses by a chain of ifs and keeps no list; these are its names in 1.6.2 besides the prefixes.
_CLASSIFICATION = """
    cifar10 cifar100 imagenet1k imagenet-w babel_imagenet imagenet1k-unverified imagenetv2 imagenet_sketch imagenet-a
    imagenet-r imagenet-o objectnet voc2007 voc2007_multilabel food101 sun397 cars fgvc_aircraft dtd pets caltech101
    flowers mnist stl10 eurosat gtsrb country211 pcam renderedsst2 fer2013 dummy
"""
_RETRIEVAL = "mscoco_captions multilingual_mscoco_captions crossmodal3600 xtd10 xtd200 flickr30k-200 flickr30k flickr8k"
_SELECTION = """
    winoground sugar_crepe/add_att sugar_crepe/add_obj sugar_crepe/replace_att sugar_crepe/replace_obj
    sugar_crepe/replace_rel sugar_crepe/swap_att sugar_crepe/swap_obj
"""
CLASSIFICATION, CAPTIONS = tuple(_CLASSIFICATION.split()), (*_RETRIEVAL.split(), *_SELECTION.split())


def _declare(names: str, summary: str, function: str, contents: str | None, task: str | None, **prefix: object) -> None:
    build = f"tokensieve.data.clip_benchmark_source:{function}"
    for name in names.split():
        DATASETS.add(DatasetSpec(name, summary, build, contents, task, group="clip_benchmark", **prefix), origin=__name__)  # type: ignore[arg-type]


_declare(_CLASSIFICATION, "images with labels, as clip_benchmark reads them", "build_labels", "labels", CLASSIFY)
_declare(_RETRIEVAL, "images with captions, as clip_benchmark reads them", "build_captions", "captions", RETRIEVE)
_declare(_SELECTION, "images with true and false captions, as clip_benchmark reads them", "build_captions", "captions", SELECT)
DATASETS.add(
    DatasetSpec(
        "wds/",
        "webdataset shards in a folder or at an http(s) address",
        "tokensieve.data.streams:build_shards",
        contents=None,
        task=None,
        group="clip_benchmark",
        argument="NAME",
        is_format=True,
    ),
    origin=__name__,
)
_declare("tfds/", "a data set of tensorflow_datasets, with labels", "build_labels", "labels", CLASSIFY, argument="NAME")
_declare("vtab/", "a data set of VTAB, with labels", "build_labels", "labels", CLASSIFY, argument="NAME")
