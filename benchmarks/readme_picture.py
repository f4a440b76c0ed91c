"""Draws docs/picture.png: how three plans reduce embedded test images, and what plans lose at what measured speed-up.

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
RESULTS = ROOT / "benchmarks/results"
SHOWN = (3, 11)  # indices of test images, chosen before any result was known
PLANS = ("cover:32", "anchor:60", "random:60")
KINDS = {  # label, colour and marker of a plan, by the methods in it
    "resize + cover": ("#D55E00", "o"),
    "cover": ("#CC79A7", "o"),
    "resize": ("#0072B2", "s"),
    "tome": ("#009E73", "^"),
    "rest merged": ("#E69F00", "v"),
    "rest dropped": ("#777777", "x"),
}
MODELS = {  # title: result files
    "CLIP ViT-B/16, 286 photos": "equal_time_clip.json",
    "embedded CLIP": "equal_time_embedded.json",
    "embedded LLaVA, cuts at its tower's output": "cover-vqa_*@out*.json",
    "embedded re-identification": "cover-reid_*.json",
}


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


def kind(text: str) -> str:
    """What a plan is drawn as."""
    plan = Plan.parse(text)
    names = {step.method.name for step in plan.steps}
    if names == {"resize", "cover"}:
        return "resize + cover"
    if len(names) == 1 and names <= {"cover", "resize", "tome"}:
        return names.pop()
    return "rest merged" if any(step.merges for step in plan.steps) else "rest dropped"


def read_points(pattern: str) -> list[tuple[str, float, float, float]]:
    """(plan, speed-up, lost points, standard error) of every plan in the result files."""
    points = []
    for path in sorted(RESULTS.glob(pattern)):
        found = json.loads(path.read_text())
        if "rows" in found:
            points += [(row["plan"], row["speedup"], row["lost"], row["lost_stderr"]) for row in found["rows"]]
        else:
            cut = found["reduction"]
            speed = cut["images_per_second"] / cut["images_per_second_full"]
            lost = cut["lost"] if "lost" in cut else _lost_on_average(path.name.split("_")[0], found)
            points.append((cut["plan"], speed, lost, cut.get("lost_stderr", 0.0)))
    return [point for point in points if point[0] != "none" and "sizes=no" not in point[0]]


def _lost_on_average(name: str, found: dict[str, Any]) -> float:
    """What is lost of mAP, which is not a mean over samples of equal weight."""
    full: dict[str, Any] = json.loads((RESULTS / f"{name}_none.json").read_text())
    return float(full["metrics"]["mAP"] - found["metrics"]["mAP"])


def draw_losses(axis: Any, title: str, points: list[tuple[str, float, float, float]]) -> None:
    for name, (colour, marker) in KINDS.items():
        chosen = [(speed, 100 * lost, 100 * error) for plan, speed, lost, error in points if kind(plan) == name]
        if chosen:
            speeds, losses, errors = zip(*chosen, strict=True)
            axis.errorbar(speeds, losses, errors, fmt=marker, color=colour, label=name, markersize=5, capsize=2, elinewidth=1)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)


def main() -> None:
    figure = Picture(figsize=(13, 5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.2, 1])
    draw_images(left)
    axes = right.subplots(2, 2)
    for axis, (title, pattern) in zip(axes.flat, MODELS.items(), strict=True):
        draw_losses(axis, title, read_points(pattern))
    for axis in axes[1]:
        axis.set_xlabel("measured speed-up", fontsize=9)
    right.supylabel("lost, percentage points (up is better)", fontsize=9)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    right.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    (ROOT / "docs/picture.png").write_bytes(figure.png())


if __name__ == "__main__":
    main()
