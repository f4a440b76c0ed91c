"""Draws docs/picture.png: what three plans keep of embedded test images, and accuracy over cost from the result files.

python benchmarks/picture.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from tokensieve import embedded
from tokensieve.data.embedded import EmbeddedScenes
from tokensieve.handle import apply
from tokensieve.models import load

ROOT = Path(__file__).parent.parent
SHOWN = (3, 11)  # test images, by number; chosen once, before any result was known
PLANS = ("anchor:60", "random:60", "grid:60")
COLOURS = {"none": "black", "anchor": "tab:red", "random": "tab:blue", "grid": "tab:green", "pool": "tab:orange"}


def kept_patches(image: Any, kept: torch.Tensor, patch: int = 8) -> np.ndarray:
    """The image with the patches that were not kept faded to grey: (h, w, 3)."""
    pixels = np.asarray(image).astype(float)
    columns = pixels.shape[1] // patch
    shown = 0.2 * pixels.mean(2, keepdims=True) + 190
    shown = np.repeat(shown, 3, axis=2)
    for index in kept.tolist():
        y, x = index // columns * patch, index % columns * patch
        shown[y : y + patch, x : x + patch] = pixels[y : y + patch, x : x + patch]
    return shown.clip(0, 255).astype(np.uint8)


def draw_images(axes: Any) -> None:
    loaded = load.load(embedded.MODEL, embedded.PRETRAINED)
    scenes = EmbeddedScenes("test")
    images = [scenes[number][0] for number in SHOWN]
    batch = torch.stack([loaded.transform(image) for image in images])
    columns: list[tuple[str, list[Any]]] = [("196 patches", list(images))]
    for plan in PLANS:
        with torch.no_grad(), apply(loaded.model, plan) as handle:
            loaded.model.encode_image(batch)
        assert handle.kept is not None
        columns.append((plan, [kept_patches(image, kept) for image, kept in zip(images, handle.kept, strict=True)]))
    for column, (title, pictures) in enumerate(columns):
        axes[0][column].set_title(title, fontsize=10)
        for row, picture in enumerate(pictures):
            axes[row][column].imshow(picture)
            axes[row][column].set_axis_off()


def draw_curve(axis: Any) -> None:
    rows = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results").glob("embedded_*.json"))]
    lines: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for row in rows:
        plan = row["reduction"]["plan"]
        name = plan.split("@")[0].split(":")[0].split("(")[0]
        rest = "merge" if "rest=merge" in plan else "drop"
        point = (row["reduction"]["gflops"], 100 * row["metrics"]["acc1"], 100 * row["metrics"]["acc1_stderr"])
        lines.setdefault((name, rest), []).append(point)
    for (name, rest), points in sorted(lines.items()):
        cost, accuracy, error = zip(*sorted(points), strict=True)
        style = {"drop": "-", "merge": "--"}[rest] if name != "none" else ""
        label = name if name in ("none", "pool") else f"{name}, rest={rest}"
        axis.errorbar(cost, accuracy, error, fmt=f"o{style}", color=COLOURS[name], label=label, markersize=4, capsize=2)
    axis.set_xlabel("GFLOPs an image")
    axis.set_ylabel("zero-shot acc1, %")
    axis.set_title("embedded test set, cut after half the depth", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def main() -> None:
    figure = plt.figure(figsize=(12, 4.2), constrained_layout=True)
    left, right = figure.subfigures(1, 2, width_ratios=[1.35, 1])
    draw_images(left.subplots(2, 1 + len(PLANS)))
    draw_curve(right.subplots())
    figure.savefig(ROOT / "docs/picture.png", dpi=110)


if __name__ == "__main__":
    main()
