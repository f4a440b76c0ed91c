"""Small folders in the published layouts of re-identification data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tokensieve.reid.layouts import MODALITIES

SMALL = (16, 8)
TRAIN, TEST = (1, 2, 3, 4, 5), (7, 8)
KINDS = {"RGB": "vis", "NI": "ni", "TI": "th"}


def picture(*key: int, size: tuple[int, int] = (8, 16)) -> Image.Image:
    pixels = np.random.default_rng(key).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def write_rgbnt201(folder: Path) -> Path:
    """Two cameras, two shots by each."""
    for split, pids in (("train_171", TRAIN), ("test", TEST)):
        for pid in pids:
            for camera in (1, 2):
                for number in (0, 1):
                    for m, modality in enumerate(MODALITIES):
                        file = folder / split / modality / f"{pid:06d}_cam{camera}_0_{number:02d}.jpg"
                        save(picture(pid, camera, number, m), file)
    return folder


def write_rgbnt100(folder: Path) -> Path:
    for split, pids in (("bounding_box_train", TRAIN), ("query", TEST), ("bounding_box_test", (*TEST, -1))):
        for pid in pids:
            for camera in (1, 8):
                strip = Image.new("RGB", (768, 128))
                for m in range(3):
                    strip.paste((pid % 256, camera, 80 * m), (256 * m, 0, 256 * (m + 1), 128))
                save(strip, folder / "rgbir" / split / f"{pid:04d}_c{camera}_0001.png")
    return folder


def write_msvr310(folder: Path) -> Path:
    for split, pids in (("bounding_box_train", TRAIN), ("query3", TEST), ("bounding_box_test", TEST)):
        for pid in pids:
            for scene in (1, 2):
                for m, kind in enumerate(KINDS.values()):
                    file = folder / split / f"{pid:04d}" / kind / f"{pid:04d}_s{scene:03d}_v{scene + 3}_000.jpg"
                    save(picture(pid, scene, m), file)
    return folder
