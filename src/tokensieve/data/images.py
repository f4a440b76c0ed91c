"""One way to open an image, whatever it is: its size is checked before decoding, and it comes out as 8-bit RGB.

Palette, grey, CMYK and transparent images are converted as Pillow does. 16-bit grey is scaled to 8 bits (Pillow's own
conversion would cut everything above 255); floats, which have no full range, are scaled by the image's own. The EXIF rotation
is not applied, since the benchmark's numbers are made without.
"""

from __future__ import annotations

import math
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from tokensieve.errors import one_line

MAX_PIXELS = 100_000_000
MAX_SIDE = 100_000
MAX_BYTES = 200_000_000  # of a file
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "MPO")  # what photographs and data sets come in
OUTLIER_SHARE = 0.001  # share of pixels, at either end, that may be hot or dead and do not set the range
T = TypeVar("T")


class BrokenImage(ValueError):
    """An image that cannot or must not be decoded."""


def open_image(source: str | Path | BinaryIO) -> Image.Image:
    """The image in RGB; BrokenImage if it is damaged or too large."""
    return decode(source, _rgb)


def decode(source: str | Path | BinaryIO, convert: Callable[[Image.Image], T]) -> T:
    """What `convert` makes of the image as it is stored; BrokenImage if it is damaged or too large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about sizes and palettes: both are handled here
            if (size := _size(source)) > MAX_BYTES:
                raise BrokenImage(f"{size:,} bytes, more than {MAX_BYTES:,}")
            with Image.open(source, formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
                    raise BrokenImage(f"{width} x {height} pixels, more than {MAX_PIXELS:,} or {MAX_SIDE:,} on a side")
                return convert(image)
    except BrokenImage:
        raise
    except UnidentifiedImageError:
        raise BrokenImage(f"it is damaged or none of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise any kind for damaged bytes: SyntaxError, ValueError, MemoryError, ...
        raise BrokenImage(f"{type(error).__name__}: {one_line(error, 200)}") from error


def _size(source: str | Path | BinaryIO) -> int:
    """The bytes of a file; of an open one, those that are left."""
    if isinstance(source, (str, Path)):
        about = os.stat(source)
        if not stat.S_ISREG(about.st_mode):
            raise BrokenImage("it is not a regular file")
        return about.st_size
    here = source.tell()
    end = source.seek(0, os.SEEK_END)
    source.seek(here)
    return end - here


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        wide = np.clip(np.asarray(image, dtype=np.int64), 0, 65535)
        return Image.fromarray((wide // 257).astype(np.uint8)).convert("RGB")
    return by_own_range(image) if image.mode == "F" else image.convert("RGB")


def by_own_range(image: Image.Image) -> Image.Image:
    """Numbers of one channel in 8-bit RGB, from black at their lowest to white at their highest; one value only: grey.

    A few hot or dead pixels set no range: one in a thousand, and at least one, are passed over at either end and are then
    white or black, unless hardly anything else differs.
    """
    values = np.asarray(image, dtype=np.float64)
    finite = np.sort(values[np.isfinite(values)])
    if not finite.size:
        raise BrokenImage("no value of it is a finite number")
    outliers = math.ceil(OUTLIER_SHARE * finite.size)
    low, high = (finite[outliers], finite[-1 - outliers]) if 2 * outliers < finite.size else (0.0, 0.0)
    if low >= high:
        low, high = finite[0], finite[-1]
    if low == high:
        return Image.new("RGB", image.size, (128, 128, 128))
    clipped = np.clip(np.nan_to_num(values, nan=low, posinf=high, neginf=low), low, high)
    return Image.fromarray(np.rint((clipped - low) / (high - low) * 255).astype(np.uint8)).convert("RGB")
