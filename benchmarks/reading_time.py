"""What it takes to read an image: CPU time to open a JPEG photo and to make it the input of a ViT-B/16.

    python benchmarks/reading_time.py

The photo is drawn: smooth colours with noise, 500 x 375 pixels, about 100 kB, near the mean of ImageNet.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from pathlib import Path

import numpy as np
import open_clip
import torch
from PIL import Image

from tokensieve import files, provenance
from tokensieve.data.images import open_image

WIDTH, HEIGHT, QUALITY, NOISE = 500, 375, 92, 16
DEFAULT = Path(__file__).parent / "results" / "reading_time.json"


def draw_photo() -> bytes:
    """A JPEG file."""
    generator = np.random.default_rng(0)
    smooth = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
        (WIDTH, HEIGHT), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(smooth, dtype=np.float64) + generator.normal(0, NOISE, (HEIGHT, WIDTH, 3))
    file = io.BytesIO()
    Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT)
    parser.add_argument("--images", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    photo = draw_photo()
    transform = open_clip.image_transform(224, is_train=False)
    seconds = []
    for _ in range(args.images + 1):
        begin = time.thread_time()
        transform(open_image(io.BytesIO(photo)))
        seconds.append(time.thread_time() - begin)
    found = {"images": args.images, "bytes": len(photo), "pixels": [WIDTH, HEIGHT], "seconds": statistics.median(seconds[1:])}
    files.write_json(args.output, found | {"versions": provenance.versions()})
    print(f"{len(photo) / 1000:.0f} kB, {1000 * found['seconds']:.1f} ms")


if __name__ == "__main__":
    main()
