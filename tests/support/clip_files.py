"""Video files for tests, written by PyAV: every frame has one grey, which says when it is shown."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

SIZE = (64, 48)  # width and height
TICKS = 90_000  # a second


def write_video(path: Path, greys: Sequence[int], times: Sequence[float] | None = None, rate: int = 10, gap: int = 12) -> Path:
    """A video with a frame for each grey, shown at these times (seconds). The left third is black, to tell how it is turned.

    gap: frames between key frames.
    """
    times = [i / rate for i in range(len(greys))] if times is None else times
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height = SIZE
        stream.pix_fmt, stream.gop_size, stream.bit_rate = "yuv420p", gap, 2_000_000
        stream.codec_context.time_base = Fraction(1, 1000)
        for grey, time in zip(greys, times, strict=True):
            pixels = np.full((SIZE[1], SIZE[0], 3), grey, np.uint8)
            pixels[:, : SIZE[0] // 3] = 0
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(time * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def write_sound(path: Path) -> Path:
    """A file with sound and no picture."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16_000)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16_000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def turn_by_header(path: Path) -> None:
    """Write into an mp4 that it is to be shown turned by a quarter, as telephones do (the matrix of the track's header)."""
    content = bytearray(path.read_bytes())
    header = content.index(b"tkhd")
    version = content[header + 4]
    matrix = header + 4 + (40 if version == 0 else 52)
    one = 1 << 16
    assert struct.unpack_from(">9i", content, matrix) == (one, 0, 0, 0, one, 0, 0, 0, 1 << 30)
    struct.pack_into(">9i", content, matrix, 0, one, 0, -one, 0, 0, SIZE[1] * one, 0, 1 << 30)
    path.write_bytes(content)
