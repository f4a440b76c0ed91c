"""One way to open an image, whatever it is: its size is checked before decoding, and it comes out as 8-bit RGB.

Palette, grey, CMYK and transparent images are converted as Pillow does. 16-bit grey is scaled to 8 bits (Pillow's own
conversion would cut everything above 255); floats, which have no full range, are scaled by the image's own. The EXIF rotation
is not applied, since the benchmark's numbers are made without; `open_photo` applies it to a user's own photos.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.Image import open as open_with_pillow  # the original, whatever other_readers puts in its place

from tokensieve.errors import short
from tokensieve.files import UnreadableFile, open_regular

MAX_PIXELS = 100_000_000
MAX_SIDE = 100_000
MAX_RATIO = 200  # of the sides: a transform that brings the shorter one to 224 makes the longer one so many times as long
MAX_BYTES = 200_000_000  # of a file
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")  # what photographs and data sets come in; MPO is a kind of JPEG
SUFFIXES = tuple(  # of files that may be such images; some are other names of the same formats
    [
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".mpo",
        ".png",
        ".apng",
        ".webp",
        ".bmp",
        ".dib",
        ".tif",
        ".tiff",
        ".gif",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
        ".pfm",
    ]
)
ORIENTATION = 0x0112  # the EXIF tag that says how a photo has to be turned
UPRIGHT = {  # its values
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
ROWS = 1_000_000  # pixels that are converted at a time
OUTLIER_SHARE = 0.001  # share of pixels, at either end, that may be hot or dead and do not set the range
T = TypeVar("T")


class BrokenImage(ValueError):
    """An image that cannot or must not be decoded."""


def open_image(source: str | Path | BinaryIO, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image in RGB; BrokenImage if it is damaged or too large."""
    return decode(source, _rgb, max_pixels)


def open_photo(source: str | Path | BinaryIO, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """`open_image` of a user's own photo: turned upright, as its EXIF says."""
    return decode(source, _upright, max_pixels)


def decode(source: str | Path | BinaryIO, convert: Callable[[Image.Image], T], max_pixels: int = MAX_PIXELS) -> T:
    """What `convert` makes of the image as it is stored; BrokenImage if it is damaged or too large.

    A file is read before it is decoded. Pillow would map some kinds to memory, which gives other pixels of damaged ones, and
    ends the process if the file gets shorter meanwhile.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about sizes and palettes: both are handled here
            with open_with_pillow(io.BytesIO(_content(source)), formats=FORMATS) as image:
                _check(image, max_pixels)
                return convert(image)
    except BrokenImage:
        raise
    except UnreadableFile as error:
        raise BrokenImage(error.reason) from None
    except UnidentifiedImageError:
        raise BrokenImage(f"it is damaged or none of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise any kind for damaged bytes: SyntaxError, ValueError, MemoryError, ...
        raise BrokenImage(f"{type(error).__name__}: {short(error, 200)}") from error


def _content(source: str | Path | BinaryIO) -> bytes:
    """The bytes of a file; of an open one, those that are left."""
    if isinstance(source, (str, Path)):
        with open_regular(source, MAX_BYTES) as (file, size):
            return file.read(size)
    content = source.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise BrokenImage(f"more than {MAX_BYTES:,} bytes")
    return content


def _check(image: Image.Image, max_pixels: int) -> None:
    """A BrokenImage if there are too many pixels, or too few for its size."""
    width, height = image.size
    if width * height > max_pixels or max(width, height) > MAX_SIDE:
        raise BrokenImage(f"{width} x {height} pixels, more than {max_pixels:,} or {MAX_SIDE:,} on a side")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise BrokenImage(f"{width} x {height} pixels, one side more than {MAX_RATIO} times the other")
    boxes = [tile[1] for tile in getattr(image, "tile", ())]  # what will be decoded; the rest would be black
    if image.format == "TIFF" and sum((right - left) * (low - top) for left, top, right, low in boxes) < width * height:
        raise BrokenImage(f"{width} x {height} pixels, but some of them are missing")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _shades(np.asarray(image), lambda rows: np.clip(rows, 0, 65535) // 257)
    return by_own_range(image) if image.mode == "F" else image.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    try:
        turn = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF leads to any kind, and says nothing about the pixels
        turn = None
    return _rgb(image) if turn is None else _rgb(image).transpose(turn)


def by_own_range(image: Image.Image) -> Image.Image:
    """Numbers of one channel in 8-bit RGB, from black at their lowest to white at their highest; one value only: grey.

    A few hot or dead pixels set no range: one in a thousand, and at least one, are passed over at either end and are then
    white or black, unless hardly anything else differs.
    """
    values = np.asarray(image)
    finite = values[np.isfinite(values)]
    if not finite.size:
        raise BrokenImage("no value of it is a finite number")
    outliers = math.ceil(OUTLIER_SHARE * finite.size)
    low = high = 0.0
    if 2 * outliers < finite.size:
        finite.partition((outliers, finite.size - 1 - outliers))
        low, high = float(finite[outliers]), float(finite[-1 - outliers])
    if low >= high:
        low, high = float(finite.min()), float(finite.max())
    if low == high:
        return Image.new("RGB", image.size, (128, 128, 128))

    def scaled(rows: np.ndarray) -> np.ndarray:
        clipped = np.clip(np.nan_to_num(rows.astype(np.float64), nan=low, posinf=high, neginf=low), low, high)
        return np.rint((clipped - low) / (high - low) * 255)

    return _shades(values, scaled)


def _shades(values: np.ndarray, convert: Callable[[np.ndarray], np.ndarray]) -> Image.Image:
    """What `convert` makes of the rows, from 0 to 255, as a grey image in RGB. Some rows at a time: they are wide numbers."""
    shades = np.empty(values.shape, np.uint8)
    step = max(1, ROWS // values.shape[1])
    for start in range(0, len(values), step):
        shades[start : start + step] = convert(values[start : start + step])
    return Image.fromarray(shades).convert("RGB")
