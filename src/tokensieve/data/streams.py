"""Data sets that are read as a stream: webdataset shards, and streams of other packages."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokensieve.data.images import open_image
from tokensieve.data.other_readers import our_images
from tokensieve.data.registry import SourceOptions
from tokensieve.data.shards import TOO_LARGE, FetchError, is_address, open_shard, read_layout, read_samples
from tokensieve.data.source import Broken, Source, Stream, worker_number
from tokensieve.errors import UserError, short
from tokensieve.provenance import digest, file_stat

IMAGE_SUFFIXES = ("webp", "png", "jpg", "jpeg")


class OtherStream(Stream):
    """A stream of another package, which decodes as it goes; its workers take turns."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = samples

    def read_encoded(self) -> Iterator[tuple[int, Any]]:
        worker, workers = worker_number()
        samples = iter(self.samples)
        for index in itertools.count():
            try:
                with our_images():
                    sample = next(samples)
            except StopIteration:
                return
            except Exception as error:  # what another package raises is anything, and its stream ends there
                yield 0, Broken("the stream", f"{type(error).__name__}: {short(error, 300)}", fatal=True)
                return
            yield index * workers + worker, sample

    def decode(self, sample: Any) -> Any:
        return sample


def build_shards(name: str, transform: Callable[[Any], Tensor], options: SourceOptions) -> Source:
    """Webdataset shards, with labels or captions."""
    layout = read_layout(name, options.folder, options.split)
    shards = layout.shards
    for shard in shards:
        if not is_address(shard):
            _check_shard(shard, len(shards))
    mark = digest([(os.path.basename(shard), *file_stat(shard)) if os.path.isfile(shard) else shard for shard in shards])
    stream = WebSamples(shards, transform, layout.captions, options.wds_cache_dir)
    return Source(stream, layout.classes, layout.templates, mark, most_workers=len(shards), captions=layout.captions)


def _check_shard(shard: str, total: int) -> None:
    """A UserError if the shard is missing or cut off, which a tar stream would ignore."""
    if not os.path.isfile(shard):
        raise UserError(f"the shard {shard} is missing, though nshards.txt counts {total}.")
    with open(shard, "rb") as file:
        file.seek(max(0, os.path.getsize(shard) - 1024))
        if file.read() != bytes(1024):  # two empty blocks end every tar file
            raise UserError(f"the shard {shard} is damaged or cut off: it does not end like a tar file. Fetch it again.")


class WebSamples(Stream):
    """Samples of webdataset shards: an image (webp, png, jpg, jpeg) and `cls` (a number), `npy` (several labels) or `txt`."""

    def __init__(
        self, shards: Sequence[str], transform: Callable[[Any], Tensor], captions: bool, cache_dir: str | None = None
    ) -> None:
        self.shards, self.transform, self.captions, self.cache_dir = shards, transform, captions, cache_dir

    def read_encoded(self) -> Iterator[tuple[int, Any]]:
        worker, workers = worker_number()
        for shard in self.shards[worker::workers]:
            try:
                with open_shard(shard, self.cache_dir) as file:
                    for key, sample in read_samples(file):
                        name = f"{os.path.basename(shard)}/{key}"
                        yield int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2, (key, sample)
            except FetchError as error:  # raised here, it would lose its type between processes
                yield 0, Broken(shard, short(error, 300), fatal=True)
                return
            except Exception as error:  # damaged archives lead to any kind; raised, it would lose it between processes
                yield 0, Broken(shard, f"{short(' '.join(map(str, error.args)), 300)}; fetch it again", fatal=True)
                return

    def decode(self, sample: Any) -> Any:
        if isinstance(sample, Broken):
            return sample
        name, sample = sample
        content = next((sample[suffix] for suffix in IMAGE_SUFFIXES if suffix in sample), None)
        if TOO_LARGE in sample:
            return Broken(name, sample[TOO_LARGE].decode())
        if content is None:
            return Broken(name, f"no image among {', '.join(sample)}")
        try:
            target = self._target(sample)
            return self.transform(open_image(io.BytesIO(content))), target
        except Exception as error:  # labels of any content lead to any kind
            return Broken(name, f"{type(error).__name__}: {short(error, 300)}")

    def _target(self, sample: Mapping[str, bytes]) -> Any:
        if self.captions:
            captions = sample["txt"].decode("utf-8").splitlines()
            if not captions:
                raise ValueError("it has no caption")
            return captions
        if "npy" in sample:
            return torch.from_numpy(np.load(io.BytesIO(sample["npy"]), allow_pickle=False))
        return int(sample["cls"])
