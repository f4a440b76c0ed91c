"""Small pictures of one colour, and webdataset shards of them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ["red", "green", "blue", "grey", "yellow", "pink"]
COLOURS = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (120, 120, 120), (200, 200, 30), (220, 120, 180)]


def picture(label: int, seed: int) -> Image.Image:
    """A noisy image of one colour."""
    noise = np.random.default_rng(seed).integers(-30, 30, (48, 40, 3))
    return Image.fromarray(np.clip(np.array(COLOURS[label]) + noise, 0, 255).astype(np.uint8))


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_shards(folder: Path, samples: list[dict[str, bytes]], shards: int = 2, kind: str = "classification") -> Path:
    """A webdataset as clip_benchmark lays it out; each sample: suffix -> content."""
    (folder / "test").mkdir(parents=True)
    for shard in range(shards):
        with tarfile.open(folder / "test" / f"{shard}.tar", "w") as tar:
            for number, sample in enumerate(samples):
                if number % shards != shard:
                    continue
                for suffix, content in sample.items():
                    entry = tarfile.TarInfo(f"s{number:07d}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    (folder / "test" / "nshards.txt").write_text(str(shards))
    (folder / "classnames.txt").write_text("\n".join(CLASSES))
    (folder / "zeroshot_classification_templates.txt").write_text("a {c} thing.\na photo in {c}")
    if kind != "classification":
        (folder / "dataset_type.txt").write_text(kind)
    return folder


def many_hot(labels: list[int]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.isin(np.arange(len(CLASSES)), labels).astype(np.int64))
    return buffer.getvalue()
