"""Whatever the file is, open_image gives 8-bit RGB or says why not."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tokensieve.data.images import MAX_PIXELS, BrokenImage, open_image


def stored(image: Image.Image, kind: str = "PNG") -> io.BytesIO:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize(
    ("mode", "kind"), [("L", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("LA", "PNG"), ("1", "PNG"), ("CMYK", "JPEG")]
)
def test_every_mode_becomes_what_pillow_makes_of_it(mode: str, kind: str) -> None:
    ramp = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5).convert(mode)
    opened = open_image(stored(ramp, kind))
    assert opened.mode == "RGB"
    assert np.array_equal(opened, Image.open(stored(ramp, kind)).convert("RGB"))


def test_sixteen_bits_are_scaled_not_cut() -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    opened = np.asarray(open_image(stored(Image.fromarray(ramp))))
    assert opened.shape == (16, 16, 3)
    assert np.array_equal(opened[..., 0].ravel(), np.arange(256))


def test_broken_files_are_named(tmp_path: Path) -> None:
    whole = stored(Image.effect_noise((64, 64), 50)).getvalue()
    for content in (b"", b"not an image", whole[: len(whole) // 2], whole[:30]):
        (tmp_path / "broken file.png").write_bytes(content)
        with pytest.raises(BrokenImage):
            open_image(tmp_path / "broken file.png")
    with pytest.raises(BrokenImage, match="FileNotFoundError"):
        open_image(tmp_path / "missing.png")


def _huge_png(width: int, height: int) -> io.BytesIO:
    """A header that promises many pixels, and hardly any data."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return io.BytesIO(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [int(MAX_PIXELS**0.5) + 1, 20_000])
def test_huge_images_are_refused_before_decoding(side: int, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(BrokenImage, match="pixels"):
        open_image(_huge_png(side, side))
    assert not recwarn.list, "the refusal says it all"
