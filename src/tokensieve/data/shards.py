"""Web datasets: tar files whose members of one name form a sample, in a folder or at an http(s) address.

    ROOT/test/nshards.txt, ROOT/test/0.tar, ROOT/test/1.tar, ...           the same for other splits
    ROOT/classnames.txt, ROOT/zeroshot_classification_templates.txt        one a line, if there are any
    ROOT/dataset_type.txt                                                  "retrieval": samples have captions, not labels

This is clip_benchmark's layout. Everything is read here, by urllib where it is an address: no other program is started, and no
text of the user's reaches a shell.
"""

from __future__ import annotations

import os
import re
import tarfile
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import IO
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit

from tokensieve.data.images import MAX_BYTES
from tokensieve.errors import UserError, one_line, short
from tokensieve.provenance import digest

CLASSES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"
MAX_SHARDS = 1_000_000
MAX_TEXT = 10_000_000  # bytes of a text file
SECONDS = 60  # without an answer
HUB = "https://huggingface.co/datasets/"
TOO_LARGE = "__too_large__"  # in place of a suffix: which member was not read
_NAME = re.compile(r"((?:.*/|)[^.]+)\.([^/]*)")  # folders and name up to the first dot, and all suffixes


@dataclass(frozen=True)
class Layout:
    """What the text files say."""

    shards: list[str]  # paths or addresses
    captions: bool
    classes: list[str]
    templates: list[str]


class FetchError(OSError):
    """A shard that could not be fetched or kept. The message has the reason, and what to do."""


def is_address(text: str) -> bool:
    return "://" in text


def read_layout(name: str, folder: str, split: str) -> Layout:
    """The text files of a web dataset; a UserError if the number of shards is not there."""
    texts, tars = _places(folder)
    counted = _join(texts, split, "nshards.txt")
    count = _read_text(counted)
    if count is None:
        raise UserError(
            f"{name}: there is no {short(counted, 200)}. Give --dataset_root with the folder that holds {split}/nshards.txt, "
            f"{split}/0.tar, ... and classnames.txt, or another --split."
        )
    if not re.fullmatch(r"[0-9]{1,7}", count.strip()) or not 0 < int(count) <= MAX_SHARDS:
        raise UserError(
            f"{name}: {short(counted, 200)} holds {one_line(count, 40)!r}, not a number of shards from 1 to {MAX_SHARDS:,}"
        )
    shards = [_join(tars, split, f"{number}.tar") for number in range(int(count))]
    classes, templates = (_read_lines(_join(texts, file)) for file in (CLASSES, TEMPLATES))
    kind = (_read_text(_join(texts, "dataset_type.txt")) or "").strip().lower()
    is_retrieval = kind == "retrieval"
    return Layout(shards, is_retrieval, [] if is_retrieval else classes, [] if is_retrieval else templates)


def _places(folder: str) -> tuple[str, str]:
    """Where the text files and where the tar files are. Large files on the Hub have addresses of their own."""
    if not is_address(folder):
        return folder, folder
    address = urlsplit(folder)
    if address.scheme not in ("http", "https") or not address.hostname or re.search(r"[\s'\"\\<>|^`{}]", folder):
        raise UserError(f"--dataset_root {one_line(folder, 80)!r} is neither a folder nor an http(s) address")
    parts = folder.removeprefix(HUB).split("/", 3)
    if folder.startswith(HUB) and len(parts) == 4:  # USER/REPOSITORY/tree/BRANCH
        user, repository, _, branch = parts
        return f"{HUB}{user}/{repository}/raw/{branch}", f"{HUB}{user}/{repository}/resolve/{branch}"
    return folder, folder


def _join(place: str, *names: str) -> str:
    return "/".join([place.rstrip("/"), *map(quote, names)]) if is_address(place) else os.path.join(place, *names)


def _read_lines(place: str) -> list[str]:
    return [line.strip() for line in (_read_text(place) or "").splitlines()]


def _read_text(place: str) -> str | None:
    """The text of a small file; None if it is not there."""
    try:
        with _open(place) as file:
            return file.read(MAX_TEXT).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{short(place, 200)} is not text in UTF-8 ({one_line(error, 80)})") from None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except HTTPError as error:
        if error.code in (403, 404, 410):
            return None
        raise UserError(f"{short(place, 200)} cannot be read: {one_line(error, 100)}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{short(place, 200)} cannot be read: {one_line(error, 100)}") from None


def _open(place: str) -> IO[bytes]:
    if is_address(place):
        return urllib.request.urlopen(place, timeout=SECONDS)
    return open(place, "rb")


def open_shard(shard: str, cache_dir: str | None) -> IO[bytes]:
    """The bytes of a shard. With a folder for it, one from an address is fetched once and kept there."""
    if cache_dir is None or not is_address(shard):
        return _open(shard)
    kept = os.path.join(cache_dir, f"{digest(shard)[:16]}-{os.path.basename(urlsplit(shard).path)}")
    if not os.path.exists(kept):
        with _open(shard) as source:
            _keep(source, kept)
    return open(kept, "rb")


def _keep(source: IO[bytes], path: str) -> None:
    """Write what is fetched to a file, whole or not at all."""
    partial = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(partial, "wb") as target:
            while block := _next_block(source):
                target.write(block)
        os.replace(partial, path)
    except FetchError:
        raise
    except OSError as error:
        reason = f"it cannot be kept in {os.path.dirname(path)} ({error.strerror}); give another --wds_cache_dir"
        raise FetchError(reason) from error
    finally:
        with suppress(OSError):
            os.unlink(partial)


def _next_block(source: IO[bytes]) -> bytes:
    try:
        block = source.read(1 << 20)
    except (OSError, HTTPException) as error:
        raise FetchError(f"{one_line(error, 100)}; fetch it again") from error
    if not block and isinstance(source, HTTPResponse) and source.length:  # so many bytes are missing
        raise FetchError("the connection ended before all of it was there; fetch it again")
    return block


def read_samples(file: IO[bytes]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The samples of a shard: what the names of its members begin with, and their contents by suffix."""
    key, sample = "", dict[str, bytes]()
    with tarfile.open(fileobj=file, mode="r|*") as tar:
        for member in tar:
            named = _NAME.fullmatch(member.name)
            if not member.isfile() or named is None or os.path.basename(member.name).startswith("__"):
                continue
            suffix = named[2].lower()
            if sample and (named[1] != key or suffix in sample):
                yield key, sample
                sample = {}
            key = named[1]
            content = tar.extractfile(member)
            if member.size > MAX_BYTES or content is None:
                sample[TOO_LARGE] = f"{member.name} has {member.size:,} bytes, more than {MAX_BYTES:,}".encode()
                continue
            sample[suffix] = content.read()
    if sample:
        yield key, sample
