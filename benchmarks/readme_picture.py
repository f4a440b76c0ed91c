"""Draws docs/picture.png: the patches three plans keep in embedded test images, and accuracy over cost from the result files.

python benchmarks/readme_picture.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokensieve import embedded
from tokensieve.drawing import show_images
from tokensieve.drawing.band import Band
from tokensieve.drawing.panels import draw_kept, draw_original
from tokensieve.drawing.sheet import Picture, legend
from tokensieve.models import loading
from tokensieve.plan import Plan

ROOT = Path(__file__).parent.parent
SHOWN = (3, 11)  # indices of test images, chosen before any result was known
PLANS = ("anchor:60", "learned:60", "random:60")
COLOURS = {"none": "#000000", "anchor": "#D55E00", "random": "#0072B2", "grid": "#009E73", "pool": "#E69F00"}
COLOURS |= {"learned": "#CC79A7", "anchor k=K": "#8B3A00"}


def draw_images(sheet: Any) -> None:
    loaded = loading.load(embedded.MODEL, embedded.PRETRAINED)
    originals = [show_images.read(f"{show_images.EMBEDDED}{number}", 0) for number in SHOWN]
    bands: list[list[Band]] = show_images.make_bands(loaded, [Plan.parse(plan) for plan in PLANS], originals)
    axes = sheet.subplots(len(SHOWN), 1 + len(PLANS))
    for row, of_image in zip(axes, bands, strict=True):
        draw_original(row[0], of_image[0])
        for axis, band in zip(row[1:], of_image, strict=True):
            draw_kept(axis, band, band.stages[-1])
    for axis, title in zip(axes[0], ("196 patches", *PLANS), strict=True):
        axis.set_title(title, fontsize=10)
    every = [band for of_image in bands for band in of_image]
    legend(sheet, every, loc="outside lower center", ncols=4)


def draw_curve(axis: Any) -> None:
    rows = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results").glob("embedded_*.json"))]
    lines: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for row in rows:
        plan = row["reduction"]["plan"]
        if "@" in plan:  # another depth
            continue
        name = plan.split(":")[0].split("(")[0] + (" k=K" if "(k=" in plan else "")
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
    axis.legend(fontsize=7, handlelength=3.5, ncols=2, loc="lower right")


def main() -> None:
    figure = Picture(figsize=(12, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.35, 1])
    draw_images(left)
    draw_curve(right.subplots())
    (ROOT / "docs/picture.png").write_bytes(figure.png())


if __name__ == "__main__":
    main()
