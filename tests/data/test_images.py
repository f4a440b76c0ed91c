"""Whatever the file is, open_image gives 8-bit RGB or says why not."""

from __future__ import annotations

import io
import os
import re
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.paths import ROOT
from tokensieve.data.clip_benchmark_source import CheckedDataset
from tokensieve.data.images import MAX_PIXELS, BrokenImage, _rgb, open_image
from tokensieve.data.other_readers import our_images
from tokensieve.data.source import Broken
from tokensieve.data.streams import OtherStream


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
    with pytest.raises(BrokenImage, match=r"^No such file or directory$"):
        open_image(tmp_path / "missing.png")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("folder.png", "pipe.png", "a\0b.png", "x" * 5000):
        with pytest.raises(BrokenImage):
            open_image(tmp_path / name)


def test_formats_that_are_not_photographs_are_refused() -> None:
    assert open_image(stored(Image.new("RGB", (16, 16)), "MPO")).size == (16, 16)  # a JPEG of several images
    for kind in ("ICO", "TGA", "PCX", "DDS"):
        with pytest.raises(BrokenImage, match="it is damaged or none of JPEG"):
            open_image(stored(Image.new("RGB", (16, 16)), kind))


@pytest.mark.parametrize("size", [(100_001, 1), (1, 500), (2, 1000)])
def test_images_that_a_transform_would_blow_up_are_refused(size: tuple[int, int]) -> None:
    """The shorter side of 1 x 500 pixels brought to 224 makes 25 million of them."""
    with pytest.raises(BrokenImage, match="pixels"):
        open_image(stored(Image.new("RGB", size)))
    assert open_image(stored(Image.new("RGB", (1, 200)))).size == (1, 200)


def test_a_tiff_without_some_of_its_rows_is_refused(tmp_path: Path) -> None:
    whole = stored(Image.effect_noise((64, 64), 50), "TIFF").getvalue()
    rows = whole.index(struct.pack("<HHI", 278, 4, 1)) + 8 if struct.pack("<HHI", 278, 4, 1) in whole else 0
    assert rows, "the tag RowsPerStrip"
    (tmp_path / "x.tif").write_bytes(whole[:rows] + struct.pack("<I", 3) + whole[rows + 4 :])
    for source in (tmp_path / "x.tif", io.BytesIO((tmp_path / "x.tif").read_bytes())):
        with pytest.raises(BrokenImage, match="64 x 64 pixels, but some of them are missing"):
            open_image(source)


def test_large_images_of_wide_numbers_need_little_memory() -> None:
    """Rows are converted some at a time, with the same result as all at once."""
    values = np.random.default_rng(0).integers(-9, 70_000, (3, 700_000)).astype(np.int32)
    assert np.array_equal(np.asarray(_rgb(Image.fromarray(values)))[..., 0], np.clip(values, 0, 65535) // 257)


def test_data_sets_of_other_packages_open_images_in_the_same_way(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    Image.fromarray(ramp).save(tmp_path / "wide.png")
    Image.new("RGB", (16, 16)).save(tmp_path / "x.ico")
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff")

    class Foreign:
        """As torchvision's are written."""

        samples = tuple((tmp_path / name, 0) for name in ("wide.png", "x.ico", "broken.jpg"))

        def __len__(self) -> int:
            return len(self.samples)

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            with open(self.samples[index][0], "rb") as file:
                return Image.open(file).convert("RGB"), 0

    stock = Image.open
    data = CheckedDataset(Foreign())
    assert np.array_equal(np.asarray(data[0][0])[..., 0].ravel(), np.arange(256))  # scaled, not cut
    for index in (1, 2):
        assert isinstance(data[index], Broken) and data[index].reason.startswith("it is damaged or none of JPEG")
    assert Image.open is stock
    with our_images():
        assert Image.open is not stock
        with ThreadPoolExecutor(1) as other:  # which is not concerned
            assert other.submit(lambda: Image.open(tmp_path / "wide.png").mode).result() == "I;16"


def test_no_module_decodes_images_in_another_way() -> None:
    other = re.compile(r"Image\.open|torchvision\.io|decode_jpeg|imread|imageio|cv2|ImageFile\.Parser")
    ours = {path.relative_to(ROOT / "src/tokensieve").as_posix(): path.read_text() for path in (ROOT / "src").rglob("*.py")}
    found = {name for name, text in ours.items() if other.search(text)}
    # what puts ours in its place; pictures that we drew
    assert found == {"data/other_readers.py", "report/examples.py", "drawing/show_videos.py"}


def test_a_stream_of_another_package_that_raises_is_a_broken_sample() -> None:
    def samples() -> Iterator[int]:
        yield 7
        raise RuntimeError("no\x1b more")

    good, broken = list(OtherStream(samples()).read_encoded())
    assert good == (0, 7) and broken[1] == Broken("the stream", "RuntimeError: no? more", fatal=True)


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
