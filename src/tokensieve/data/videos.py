"""One way to open a video: a few frames, evenly spread over its time, upright, in 8-bit RGB.

A video is decoded by PyAV, which is imported here alone. Frames are picked by the time at which they are shown, not by their
number, so that a variable rate changes nothing. Of a long video the decoder jumps from frame to frame.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from PIL import Image

from tokensieve.data.images import MAX_PIXELS, BrokenImage
from tokensieve.errors import short
from tokensieve.files import UnreadableFile, open_regular
from tokensieve.installation.packages import naming_extras

SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".wmv", ".flv", ".3gp", ".ogv")
FRAMES = 8  # that are shown unless another number is asked for
LONG = 600.0  # seconds; of longer videos frames lie far apart, which is told
# Containers that hold their own pictures. Others, such as playlists, name further files or addresses, which nobody asked for.
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,asf,flv,ogg,gif"
WHOLE = 0.9  # of the length that its header says have to be there; the rest may be rounding, or sound that goes on
UNEVEN = 0.5  # of the usual time between frames: by so much the rate varies; less is rounding to the ticks of the clock
JUMP = 20.0  # seconds; frames of longer videos are looked for one by one, those of shorter ones in one pass


@dataclass(frozen=True)
class Video:
    """Frames of a video, and when each is shown, in seconds from its start."""

    frames: tuple[Image.Image, ...]
    times: tuple[float, ...]

    def evenly(self, number: int) -> Video:
        """So many of the frames, evenly spread."""
        picked = [(2 * i + 1) * len(self.frames) // (2 * number) for i in range(number)]
        return Video(tuple(self.frames[i] for i in picked), tuple(self.times[i] for i in picked))

    @property
    def rate(self) -> float:
        """Frames a second; 1 for a single one."""
        span = self.times[-1] - self.times[0]
        return (len(self.times) - 1) / span if span > 0 else 1.0


def open_video(path: str | Path, frames: int = FRAMES) -> Video:
    """So many frames of a video, from the middles of equal parts of its time; BrokenImage if it cannot be decoded.

    A video with fewer frames shows some of them again.
    """
    with _opened(path) as container:
        stream = _stream(container)
        length = _length(container, stream)
        if length is None:
            times = [float(frame.time) for frame in _decoded(container, stream)]
            if not times:
                raise BrokenImage("it has no frame")
            begin, length = times[0], times[-1] - times[0]
            container.seek(0)
        else:
            begin = float((stream.start_time or 0) * stream.time_base)
        wanted = [begin + length * (2 * i + 1) / (2 * frames) for i in range(frames)]
        read = _jump if length > JUMP else _pass
        shown = list(read(container, stream, wanted, begin + WHOLE * length))
    return Video(tuple(image for image, _ in shown), tuple(max(0.0, time - begin) for _, time in shown))


@dataclass(frozen=True)
class Header:
    """What is known of a video before its frames are read."""

    seconds: float | None  # how long it is; None: that is not said
    is_turned: bool  # its frames are written lying, and turned upright
    has_variable_rate: bool  # of formats that list the times of all frames (mp4, mov); of others it is not known


def read_header(path: str | Path) -> Header:
    """The header of a video, and how its first frame lies. BrokenImage if there is no video."""
    with _opened(path) as container:
        stream = _stream(container)
        length, is_variable = _length(container, stream), _has_variable_rate(stream)
        first = next(_decoded(container, stream), None)
        return Header(length, first is not None and _turn(first) != 0, is_variable)


def has_av() -> bool:
    """Whether videos can be decoded on this machine."""
    try:
        import av  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    """The open container; what decoders raise for damaged files is a BrokenImage."""
    with naming_extras():
        import av
    try:
        with open_regular(path) as (file, size):
            if not size:
                raise BrokenImage("the file is empty")
            with av.open(file, options={"format_whitelist": CONTAINERS}, metadata_errors="ignore") as container:
                yield container
    except BrokenImage:
        raise
    except UnreadableFile as error:
        raise BrokenImage(error.reason) from None
    except (av.error.FFmpegError, ValueError, ArithmeticError, MemoryError) as error:
        raise BrokenImage(f"it cannot be decoded ({short(_reason(error), 200)})") from error


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None)
    return str(text or error or type(error).__name__)


def _stream(container: Any) -> Any:
    """The video stream; a BrokenImage if there is none, if it is of an unknown kind, or if its frames are too large."""
    if not container.streams.video:
        raise BrokenImage("it has no video, only sound or data")
    stream = container.streams.video[0]
    if stream.codec_context is None:  # damage to the header can make any name of a codec
        raise BrokenImage("its header names no codec that is known here")
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > MAX_PIXELS:
        raise BrokenImage(f"{width} x {height} pixels, more than {MAX_PIXELS:,}")
    stream.thread_type = "AUTO"
    return stream


def _length(container: Any, stream: Any) -> float | None:
    """Seconds by the header; None if it has no length, or none that can be true."""
    if stream.duration is not None and stream.time_base is not None:
        length = float(stream.duration * stream.time_base)
    elif container.duration is not None:
        length = float(Fraction(container.duration, 1_000_000))
    else:
        return None
    return length if math.isfinite(length) and length > 0 else None


def _has_variable_rate(stream: Any) -> bool:
    """Whether the times of the frames are unevenly spaced, where the file lists all of them."""
    times = sorted(entry.timestamp for entry in getattr(stream, "index_entries", ()))  # PyAV 15 has none
    if len(times) < 3 or len(times) != stream.frames:  # other lists are of key frames
        return False
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    usual = gaps[len(gaps) // 2]
    return bool(gaps[-1] - usual > UNEVEN * usual or usual - gaps[0] > UNEVEN * usual)


def _decoded(container: Any, stream: Any) -> Iterator[Any]:
    """The frames that have a time, in order."""
    return (frame for frame in container.decode(stream) if frame.time is not None)


def _pass(container: Any, stream: Any, wanted: Sequence[float], end: float) -> Iterator[tuple[Image.Image, float]]:
    """For every time the frame that is shown then, with its own time; in one pass. end: until when there are frames."""
    last: Any = None
    left = list(wanted)
    for frame in _decoded(container, stream):
        while left and last is not None and frame.time > left[0]:
            left.pop(0)
            yield _upright(last), last.time
        if not left:
            return
        last = frame
    if last is None:
        raise BrokenImage("it has no frame")
    last_shown = last.time + float((last.duration or 0) * last.time_base)
    if left and last_shown < min(end, left[-1]):
        raise BrokenImage(f"it ends after {last_shown:.1f} s, before the {end / WHOLE:.1f} s that its header says")
    for _ in left:
        yield _upright(last), last.time


def _jump(container: Any, stream: Any, wanted: Sequence[float], end: float) -> Iterator[tuple[Image.Image, float]]:
    """The same, from the key frame before each time on."""
    for time in wanted:
        container.seek(int(time / stream.time_base), stream=stream)
        yield from _pass(container, stream, [time], end)


def _upright(frame: Any) -> Image.Image:
    """The frame as it is meant to be seen: a telephone held upright writes a rotation beside the pixels."""
    image: Image.Image = frame.to_image()
    turn = _turn(frame)
    return image.rotate(turn, expand=True) if turn else image


def _turn(frame: Any) -> int:
    """By how many degrees the frame has to be turned, against the clock."""
    return round(frame.rotation) % 360
