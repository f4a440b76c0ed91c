"""Data sets that are read as a stream: webdataset shards, and streams of other packages."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokensieve.data.images import BrokenImage, open_image
from tokensieve.data.source import Broken, Source, Stream, worker_number
from tokensieve.errors import UserError
from tokensieve.provenance import digest, file_stat

IMAGE_SUFFIXES = ("webp", "png", "jpg", "jpeg")


class OtherStream(Stream):
    """A stream of another package, which decodes as it goes; its workers take turns."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = samples

    def read_encoded(self) -> Iterator[tuple[int, Any]]:
        worker, workers = worker_number()
        return ((index * workers + worker, sample) for index, sample in enumerate(self.samples))

    def decode(self, sample: Any) -> Any:
        return sample


def webdataset_source(dataset: Any, transform: Callable[[Any], Tensor], cache_dir: str | None) -> Source:
    """The same shards as clip_benchmark's pipeline, decoded here: no pickles, and a broken image is counted."""
    import webdataset

    shards = [shard if isinstance(shard, str) else shard["url"] for shard in dataset.pipeline[0].urls]
    for shard in shards:
        if "://" not in shard:
            _check_shard(shard, len(shards))
    pipeline = webdataset.WebDataset(
        shards, cache_dir=cache_dir, shardshuffle=False, nodesplitter=_every_shard, empty_check=False
    )
    mark = digest([(os.path.basename(shard), *file_stat(shard)) if os.path.isfile(shard) else shard for shard in shards])
    # clip_benchmark splits the text into lines if dataset_type.txt holds "retrieval"
    captions = str.splitlines in dataset.pipeline[-1].args
    stream = WebSamples(pipeline, transform, captions)
    classes, templates = list(dataset.classes or []), dataset.templates or []
    return Source(stream, classes, templates, mark, most_workers=len(shards), captions=captions)


def _check_shard(shard: str, total: int) -> None:
    """A UserError if the shard is missing or cut off, which a tar stream would ignore."""
    if not os.path.isfile(shard):
        raise UserError(f"the shard {shard} is missing, though nshards.txt counts {total}.")
    with open(shard, "rb") as file:
        file.seek(max(0, os.path.getsize(shard) - 1024))
        if file.read() != bytes(1024):  # two empty blocks end every tar file
            raise UserError(f"the shard {shard} is damaged or cut off: it does not end like a tar file. Fetch it again.")


def _every_shard(shards: Iterable[Any]) -> Iterable[Any]:
    return shards


class WebSamples(Stream):
    """Samples of webdataset shards: an image (webp, png, jpg, jpeg) and `cls` (a number), `npy` (several labels) or `txt`."""

    def __init__(self, pipeline: Any, transform: Callable[[Any], Tensor], captions: bool) -> None:
        self.pipeline, self.transform, self.captions = pipeline, transform, captions

    def read_encoded(self) -> Iterator[tuple[int, Any]]:
        try:
            for sample in self.pipeline:
                name = f"{os.path.basename(sample['__url__'])}/{sample['__key__']}"
                yield int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2, sample
        except (tarfile.TarError, EOFError, OSError) as error:  # raised here, it would lose its type between processes
            yield 0, Broken("a shard", " ".join(map(str, error.args)), fatal=True)

    def decode(self, sample: Any) -> Any:
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
