"""Draws the pictures of docs/concepts.md: one embedded test image under plans that differ in one word.

python docs/tooling/pictures.py
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from PIL import Image

from tokensieve import embedded
from tokensieve.drawing import show_images
from tokensieve.drawing.panels import draw_kept, draw_original
from tokensieve.drawing.sheet import Picture, legend
from tokensieve.models import loading
from tokensieve.plan import Plan

ASSETS = Path(__file__).parents[1] / "assets"
IMAGE = "embedded:11"
PICTURES = {
    "plan": ("none", "anchor@4:60", "cover@4:60", "pool@4:60", "resize(size=80)"),
    "place": ("none", "cover@0:32", "cover@2:32", "cover@4:32", "cover@6:32"),
    "budget": ("none", "cover@4:50%", "cover@4:32", "cover@4:16", "cover@4:4"),
    "rest": ("none", "anchor@4:40", "anchor@4:40(rest=merge)", "anchor@4:40(rest=fuse)", "anchor@out:40(rest=zero)"),
}


def main() -> None:
    loaded = loading.load(embedded.MODEL, embedded.PRETRAINED)
    original = show_images.read(IMAGE, 0)
    for name, plans in PICTURES.items():
        (bands,) = show_images.make_bands(loaded, [Plan.parse(plan) for plan in plans], [original])
        figure = Picture(figsize=(11, 2.7), layout="constrained")
        for axis, band, plan in zip(figure.subplots(1, len(plans)), bands, plans, strict=True):
            draw_kept(axis, band, band.stages[-1]) if band.stages else draw_original(axis, band)
            axis.set_title(plan, fontsize=10, family="monospace")
            axis.set_xlabel(band.tokens.removeprefix("all "), fontsize=9)
        legend(figure, bands, loc="outside lower center", ncols=5)
        with Image.open(BytesIO(figure.png())) as drawn:
            drawn.convert("RGB").quantize(256, kmeans=1).save(ASSETS / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
