"""Damaged videos: frames of a sane size, or a BrokenImage with a message."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

from tests.hostile.attack import Attack, check_message
from tests.hostile.mutate import flip_bit, mutate_bytes
from tokensieve.data.images import MAX_PIXELS, BrokenImage
from tokensieve.data.videos import Video, has_av, open_video, read_header
from tokensieve.data.vqa_layouts.images import VideoFolder

SUFFIXES = (".mp4", ".mkv", ".avi", ".mov")
HEADER = 2000  # bytes at both ends, where most formats have theirs


@functools.cache
def written() -> list[tuple[str, bytes]]:
    """Videos in several containers, with their suffix: a short one, and one in which the reader jumps from frame to frame."""
    from tests.support import clip_files

    made = []
    with tempfile.TemporaryDirectory() as folder:
        for suffix in SUFFIXES:
            for rate in (10, 1):
                path = clip_files.write_video(Path(folder, f"a{suffix}"), range(0, 250, 10), [i / rate for i in range(25)])
                made.append((suffix, path.read_bytes()))
    return made


def _damaged(rng: random.Random, content: bytes) -> bytes:
    kind = rng.random()
    if kind < 0.3:
        return mutate_bytes(rng, content)
    if kind < 0.5:
        for _ in range(rng.choice((1, 5, 50))):
            content = flip_bit(rng, content)
        return content
    head, tail = content[:HEADER], content[-HEADER:]  # all that the rest is read by
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 3, 10))):
            head = flip_bit(rng, head)
        return head + content[HEADER:]
    for _ in range(rng.choice((1, 3, 10))):
        tail = flip_bit(rng, tail)
    return content[:-HEADER] + tail


def _one_try(rng: random.Random, folder: Path) -> None:
    if not has_av():
        return
    suffix, content = rng.choice(written())
    path = folder / f"a{suffix}"
    path.write_bytes(_damaged(rng, content))
    try:
        video = open_video(path, rng.choice((1, 4, 8)))
        assert isinstance(video, Video) and video.rate > 0
        assert all(frame.mode == "RGB" and frame.width * frame.height <= MAX_PIXELS for frame in video.frames)
    except BrokenImage as error:
        check_message(str(error))
    try:
        header = read_header(path)
        assert header.seconds is None or header.seconds > 0
    except BrokenImage as error:
        check_message(str(error))
    VideoFolder(folder, 2).header(path.name)


ATTACKS = (Attack("video files", "damaged videos of several containers", _one_try, per_thousand=500, short=100, seconds=60),)
