"""Damaged and malicious images: an RGB image of a sane size, or a BrokenImage with a message; never much memory."""

from __future__ import annotations

import functools
import io
import os
import random
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from tests.hostile.attack import Attack, check_message
from tests.hostile.mutate import mutate_bytes
from tokensieve.data.images import FORMATS, MAX_PIXELS, MAX_RATIO, MAX_SIDE, BrokenImage, decode, open_image
from tokensieve.data.source import Broken
from tokensieve.data.streams import WebSamples
from tokensieve.data.vqa_layouts.images import EncodedImages
from tokensieve.reid.scan import eight_bits

MAX_MEMORY = 1_000_000_000  # bytes that a try may add to the most this process ever had
WRITTEN = {  # format: modes and options that Pillow writes
    "JPEG": (("L", {}), ("RGB", {"progressive": True}), ("RGB", {"quality": 30}), ("CMYK", {})),
    "PNG": (("1", {}), ("L", {}), ("LA", {}), ("P", {"transparency": 3}), ("RGB", {}), ("RGBA", {}), ("I;16", {}), ("I", {})),
    "TIFF": (
        *((mode, {"compression": kind}) for mode in ("L", "RGB", "CMYK") for kind in ("raw", "tiff_lzw", "tiff_adobe_deflate")),
        *(
            ("F", {}),
            ("I;16", {}),
            ("I;16B", {}),
            ("I", {}),
            ("1", {"compression": "group4"}),
            ("RGB", {"compression": "jpeg"}),
        ),
        *(("LAB", {}), ("YCbCr", {}), ("P", {}), ("LA", {}), ("RGBA", {"compression": "packbits"})),
    ),
    "WEBP": (("RGB", {}), ("RGBA", {"lossless": True}), ("RGB", {"save_all": True})),
    "BMP": (("1", {}), ("L", {}), ("P", {}), ("RGB", {}), ("RGBA", {})),
    "GIF": (("P", {}), ("L", {"interlace": 1}), ("P", {"save_all": True})),
    "PPM": (("1", {}), ("L", {}), ("RGB", {}), ("I", {}), ("I;16", {}), ("F", {})),
    **dict.fromkeys(("ICO", "DDS", "AVIF", "TGA", "PCX", "SGI", "IM", "ICNS", "JPEG2000", "EPS", "PDF"), (("RGB", {}),)),
}


@functools.cache
def written() -> list[tuple[str, bytes]]:
    """Images in all formats and modes that Pillow writes here, with the names of the formats."""
    rng = np.random.default_rng(0)
    made = []
    for kind, variants in WRITTEN.items():
        for mode, options in variants:
            noise = rng.integers(0, 256, (17, 23, 3)).astype(np.uint8)
            if mode == "F":
                image = Image.fromarray(rng.normal(size=(17, 23)).astype(np.float32))
            elif mode.startswith("I"):
                wide = rng.integers(0, 65536, (17, 23))
                image = Image.fromarray(wide.astype({"I": np.int32, "I;16": np.uint16}.get(mode, ">u2")))
            else:
                image = Image.fromarray(noise).convert("RGB" if mode == "LAB" else mode)
                image = Image.frombytes("LAB", image.size, noise.tobytes()) if mode == "LAB" else image
            more = [image.copy()] if options.get("save_all") else []
            buffer = io.BytesIO()
            try:
                image.save(buffer, kind, **options, **({"append_images": more} if more else {}))
            except (OSError, KeyError, ValueError):  # not built into this Pillow
                continue
            made.append((kind, buffer.getvalue()))
    assert {kind for kind, _ in made} >= {*FORMATS}
    return made


def _chunk(name: bytes, content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")


def _png(rng: random.Random) -> bytes:
    """A PNG whose header or other chunks promise more than there is."""
    sides = (0, 1, 2, 64, 10_000, 100_000, 100_000_000, 2**31 - 1, 2**32 - 1)
    width, height = rng.choice(sides), rng.choice(sides)
    head = struct.pack(
        ">IIBBBBB", width, height, rng.choice((1, 8, 16, 16, 7)), rng.choice((0, 2, 3, 4, 6, 5)), 0, 0, rng.randrange(3)
    )
    bomb = zlib.compress(bytes(rng.choice((10, 10**6, 3 * 10**7))), 9)
    text = rng.choice(
        (
            _chunk(b"tEXt", b"a\0" + b"x" * rng.choice((1, 10**6, 10**7))),
            _chunk(b"zTXt", b"a\0\0" + bomb) * rng.choice((1, 1, 100)),
            _chunk(b"iTXt", b"a\0\1\0\0\0" + bomb) * rng.choice((1, 1, 100)),
            _chunk(b"iCCP", b"a\0\0" + bomb),
            _chunk(b"PLTE", rng.randbytes(rng.choice((3, 4, 768, 10**6)))),
            _chunk(b"eXIf", rng.randbytes(100)),
            _chunk(b"acTL", struct.pack(">II", 2**31, 0)),
            b"",
        )
    )
    head = head[: rng.choice((13, 13, 13, 4, 9, 0))]
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + text + _chunk(b"IDAT", bomb) + _chunk(b"IEND", b"")


def _tiff(rng: random.Random) -> bytes:
    """A TIFF with tags of any type, count and value."""
    order = rng.choice("<>")
    values = (0, 1, 3, 8, 100, 65_535, 2**31 - 1, 2**32 - 1)
    tags = {256: 64, 257: 64, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 64, 279: 4096}
    entries = []
    for tag, usual in sorted(tags.items()):
        value = usual if rng.random() < 0.8 else rng.choice(values)
        kind, count = rng.choice(((4, 1), (4, 1), (4, 1), (rng.randrange(14), rng.choice(values))))
        entries.append(struct.pack(order + "HHII", tag, kind, count, value))
    for _ in range(rng.choice((0, 0, 1, 20))):
        values_of = (rng.choice((330, 700, 34665, 34377, 347, 325, 338, 50_000)), rng.randrange(14), rng.choice(values))
        entries.append(struct.pack(order + "HHII", *values_of, rng.choice(values)))
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 8)
    following = rng.choice((0, 8, 2**31))
    return head + struct.pack(order + "H", len(entries)) + b"".join(entries) + struct.pack(order + "I", following) + bytes(5000)


def _gif(rng: random.Random) -> bytes:
    """A GIF with a huge canvas or a huge frame."""
    sides = (0, 1, 64, 9_999, 65_535)
    canvas = struct.pack("<HHBBB", rng.choice(sides), rng.choice(sides), 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", *(rng.choice(sides) for _ in range(4)), 0) + b"\x02\x02\x44\x01\x00;"
    return b"GIF89a" + canvas + frame


def _webp(rng: random.Random) -> bytes:
    """A WebP whose canvas is huge."""
    width, height = (rng.choice((0, 63, 9_999, 16_383, 2**24 - 1)) for _ in range(2))
    head = struct.pack("<I", rng.choice((0, 2, 16, 0x12))) + width.to_bytes(3, "little") + height.to_bytes(3, "little")
    anim = b"ANIM" + struct.pack("<IIH", 6, 0, 0) + b"ANMF" + struct.pack("<I", 24) + bytes(24)
    body = b"WEBPVP8X" + struct.pack("<I", 10) + head + rng.choice((b"", anim, rng.randbytes(50)))
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _jpeg(rng: random.Random) -> bytes:
    """A JPEG with other sizes, and markers in any number."""
    content = bytearray(next(content for kind, content in written() if kind == "JPEG"))
    place = content.index(b"\xff\xc0") if b"\xff\xc0" in content else 0
    content[place + 5 : place + 9] = struct.pack(">HH", *(rng.choice((0, 1, 64, 9_999, 65_535)) for _ in range(2)))
    marker = bytes((0xFF, rng.choice((0xE1, 0xE2, 0xED, 0xEE, 0xFE))))
    names = (b"Exif\0\0", b"ICC_PROFILE\0\1\2", b"MPF\0", b"Photoshop 3.0\0", b"Adobe\0d")
    data = rng.choice(names) + rng.randbytes(rng.choice((0, 4, 100, 60_000)))
    more = marker + struct.pack(">H", len(data) + 2) + data
    return bytes(content[:2]) + more * rng.choice((1, 1, 5, 300)) + bytes(content[2:])


def _other(rng: random.Random) -> bytes:
    """PPM and BMP with huge sizes, and bytes that are nothing."""
    number = str(rng.choice((0, 1, 64, 10**5, 10**8, 10**20))).encode()
    ppm = rng.choice((b"P1", b"P2", b"P3", b"P5", b"P6", b"Pf", b"P7")) + b" " + number + b" " + rng.choice((b"1", number))
    ppm += b" " + rng.choice((b"255", b"65535", b"0", b"-1", b"1e9", b"99999999999999999999")) + b"\n" + rng.randbytes(100)
    size = [rng.choice((0, 1, 64, 2**31 - 1, -64, -(2**31))) for _ in range(2)]
    head = struct.pack(
        "<IiiHHIIiiII", rng.choice((12, 40, 124, 2**31)), *size, 1, rng.choice((1, 8, 24, 32, 16)), rng.randrange(7), *[0] * 5
    )
    bmp = b"BM" + struct.pack("<IHHI", 2**31, 0, 0, rng.choice((54, 2**31))) + head
    return rng.choice(
        (ppm, bmp, b"", b"\0", rng.randbytes(500), b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\0", b"RIFF\0\0\0\0WEBP")
    )


BOMBS = (_png, _png, _tiff, _tiff, _gif, _webp, _jpeg, _other)


def _content(rng: random.Random) -> tuple[str, bytes]:
    if rng.random() < 0.35:
        return "", rng.choice(BOMBS)(rng)
    kind, content = rng.choice(written())
    return kind, content if rng.random() < 0.02 else mutate_bytes(rng, content)


def _check(call: Callable[[], Image.Image]) -> Image.Image | None:
    try:
        image = call()
    except BrokenImage as error:
        check_message(str(error))
        return None
    width, height = image.size
    assert image.mode == "RGB" and 0 < width * height <= MAX_PIXELS and max(image.size) <= MAX_SIDE
    assert max(image.size) <= MAX_RATIO * min(image.size)
    return image


def _one_try(rng: random.Random, folder: Path) -> None:
    kind, content = _content(rng)
    before = _most_memory()
    image = _check(lambda: open_image(io.BytesIO(content)))
    assert image is None or kind in ("", *FORMATS), f"{kind} was opened"
    assert _most_memory() - before < MAX_MEMORY, f"{_most_memory() - before:,} bytes of memory"
    if rng.random() < 0.2 and (image is None or image.width * image.height < 10**6):
        name = rng.choice(("a.png", "a b'\n.jpg", "ü.tif", "x.gif"))
        (folder / name).write_bytes(content)
        again = _check(lambda: open_image(folder / name))
        assert (again is None) == (image is None) and (again is None or again.tobytes() == image.tobytes())
        _check(lambda: decode(str(folder / name), eight_bits))
        sample = WebSamples([], lambda _: 0, captions=False).decode((name, {"png": content, "cls": b"3"}))
        assert sample == (0, 3) if image is not None else isinstance(sample, Broken)
        _check(lambda: EncodedImages(Path("x"), {"a": rng.choice(("ü", "A", content.hex()))}).open("a"))


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _paths(rng: random.Random, folder: Path) -> None:
    """Paths that are no files of images."""
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    with (folder / "sparse.png").open("wb") as file:
        file.truncate(rng.choice((300_000_000, 10**12)))
    names = (
        "folder.png",
        "pipe.png",
        "loop.png",
        "sparse.png",
        "none.png",
        "a\0b.png",
        "x" * 5000,
        "../" * 300 + "x",
        "\ud800",
        "",
    )
    for name in rng.sample(names, 4):
        _check(lambda name=name: open_image(folder / name))
        _check(lambda name=name: open_image(f"{folder}/{name}"))
    for place in ("/dev/zero", "/dev/null", "/dev/random"):
        assert _check(lambda place=place: open_image(place)) is None


ATTACKS = (
    Attack("image files", "damaged and malicious images of all formats", _one_try, per_thousand=2000, short=400, seconds=30),
    Attack("image paths", "paths that are no images", _paths, per_thousand=50, short=20, seconds=10),
)
