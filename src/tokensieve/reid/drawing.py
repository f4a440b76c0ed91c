"""Pictures of re-identification: what plans keep of an object in each of its modalities, and what a query finds in a gallery.

For an object every plan has one row: its images side by side with the kept patches, then the other kinds of panels (scores, and
weights where a method mixes patches). For a query every plan has one strip: the nearest objects of the gallery from left to
right, correct ones with a tick in a green frame, wrong ones with a cross in an orange one, so that colour is not the only sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle
from PIL import Image

from tokensieve.cutting.handle import Handle
from tokensieve.drawing import band as drawing_band
from tokensieve.drawing import stages
from tokensieve.drawing.band import Band
from tokensieve.drawing.geometry import Frame
from tokensieve.drawing.panels import STYLE, kinds_of
from tokensieve.drawing.sheet import (
    DPI,
    GAP,
    LINE,
    MAX_HEIGHT,
    MAX_WIDTH,
    Block,
    Panel,
    Picture,
    arrange,
    cut_panel,
    image_panel,
    panel_size,
    where,
)
from tokensieve.errors import UserError

RIGHT, WRONG = "#009E73", "#D55E00"  # distinct with every common kind of colour blindness
MODALITY_GAP = 0.08  # inches between the modalities of one object
MIN_HEIGHT = 1.0  # inches, of a panel, unless its images are very wide
TICK, CROSS = "\N{CHECK MARK}", "\N{BALLOT X}"


# --------------------------------------------------------------------------------------------------- one object under plans


@dataclass(frozen=True)
class ObjectPicture:
    """One object under one plan."""

    name: str
    about: str  # its identity and camera, where they are known
    bands: dict[str, Band]  # by modality


def picture_object(
    handle: Handle,
    images: Mapping[str, Image.Image],
    *,
    size: tuple[int, int],
    grid: tuple[int, int],
    name: str,
    about: str = "",
) -> ObjectPicture:
    """What the handle's plan did to the object of its last batch, whose rows are the object's modalities in this order.

    size: (h, w) of the model's input, to which whole images are resized.
    """
    bands = {}
    for row, (modality, image) in enumerate(images.items()):
        frame = Frame(0, 0, *image.size, size=size)
        bands[modality] = drawing_band.make_band(handle, image, row, frame=frame, grid=grid, name=f"{name} {modality}")
    return ObjectPicture(name, about, bands)


def draw(pictures: Sequence[ObjectPicture]) -> Picture:
    """Every object on the left, and beside it what each plan did: as many plans in a row as fit.

    Wide images would be tiny then: two of their blocks stand side by side.
    """
    bands = [band for one in pictures for band in one.bands.values()]
    columns = 1 + max(len(cut) for one in pictures for cut in _by_cut(one))  # the object itself, and the most beside it
    size = _panel_size(bands, columns, max(len(one.bands) for one in pictures))
    below = size[1] >= MIN_HEIGHT  # plans stand below each other, not below the object
    if not below:
        columns = 2
        size = _panel_size(bands, columns, max(len(one.bands) for one in pictures))
    rows: list[list[Block]] = []
    last: ObjectPicture | None = None
    for one in pictures:
        if last is None or last.name != one.name:
            whole = [image_panel(modality, band) for modality, band in one.bands.items()]
            rows.append([Block(one.name, [one.about] if one.about else [], whole, size, MODALITY_GAP)])
        last = one
        for cut in _by_cut(one):
            for number, (heading, notes, panels) in enumerate(cut):
                together = len(cut) if below and number == 0 else 1
                if len(rows[-1]) + together > columns:
                    blank = [Panel("", lambda axis: axis.set_axis_off()) for _ in one.bands]
                    rows.append([Block("", [], blank, size, MODALITY_GAP)] if below else [])
                rows[-1].append(Block(heading, notes, panels, size, MODALITY_GAP))
    return arrange(rows, bands)


def _panel_size(bands: Sequence[Band], columns: int, modalities: int) -> tuple[float, float]:
    """Width and height in inches, such that this many blocks of this many modalities fit side by side."""
    wide, high = (max(side) for side in zip(*map(panel_size, bands), strict=True))
    room = (MAX_WIDTH - GAP * (columns + 1) + MODALITY_GAP * columns) / (columns * modalities) - MODALITY_GAP
    shrink = min(1.0, room / wide)
    return wide * shrink, high * shrink


Row = tuple[str, list[str], list[Panel]]  # heading, notes, a panel for each modality


def _by_cut(one: ObjectPicture) -> list[list[Row]]:
    """For every cut what is drawn of it side by side; without cuts the images as they are."""
    first = next(iter(one.bands.values()))
    if not first.stages:
        whole = [image_panel(modality, band) for modality, band in one.bands.items()]
        return [[(first.plan, [f"{first.tokens} of each modality", *first.notes], whole)]]
    return [_of_cut(one, number) for number in range(len(first.stages))]


def _of_cut(one: ObjectPicture, number: int) -> list[Row]:
    """A row of panels for every kind that the cut has; the first, what was kept, under the plan."""
    first = next(iter(one.bands.values()))
    stage = first.stages[number]
    notes = [f"{where(stage.layer)}: {stage.tokens_in} → {stage.tokens_out} tokens each"]
    if stage.shares is not None:
        mixed, folded = (int((stage.states == state).sum()) for state in (stages.MIXED, stages.FOLDED))
        notes.append(f"{mixed} mixed into {stage.tokens_out - 1}, {folded} folded into 1")
    plan = (first.plan, notes + first.notes) if number == 0 else (f"{first.plan}, continued", notes)
    rows: list[Row] = []
    for kind in kinds_of(stage):
        heading, remarks = (kind.heading, [kind.remark]) if rows else plan
        panels = [cut_panel(modality, kind, band, band.stages[number]) for modality, band in one.bands.items()]
        rows.append((heading, remarks, panels))
    return rows


# ---------------------------------------------------------------------------------------------------------------- galleries


@dataclass(frozen=True)
class GalleryHit:
    """An object of the gallery, at its rank."""

    images: Mapping[str, Image.Image]
    about: list[str]  # lines below it
    distance: float
    is_match: bool


@dataclass(frozen=True)
class Strip:
    """The nearest objects of the gallery under one plan."""

    plan: str
    notes: list[str]
    name: str
    query: Mapping[str, Image.Image]
    about: list[str]  # lines below the query
    hits: list[GalleryHit] = field(default_factory=list)


SPACE = 0.14  # inches between neighbours


def draw_gallery(strips: Sequence[Strip]) -> Picture:
    """A strip for every plan: the query, and beside it the nearest objects of the gallery, their modalities stacked."""
    everything = [images for strip in strips for images in (strip.query, *(one.images for one in strip.hits))]
    modalities = list(dict.fromkeys(name for images in everything for name in images))
    shape = float(np.median([image.width / image.height for images in everything for image in images.values()]))
    wide, high = 0.98 * math.sqrt(shape), 0.98 / math.sqrt(shape)
    columns = max(len(strip.hits) for strip in strips) + 1
    lines = max(len(about) for strip in strips for about in (strip.about, *(one.about for one in strip.hits)))
    margin, apart = GAP + 0.3, 0.3  # room for the names of modalities; between query and gallery
    column = max(wide, 0.66) + SPACE  # room for the text below
    width = max(6.0, margin + columns * column + apart + GAP)
    stack = len(modalities) * (high + 0.04)
    heights = [0.3 + LINE * len(strip.notes) + 0.24 + stack + 0.1 + LINE * (lines + 1) for strip in strips]
    height = sum(heights) + 0.42
    if height * DPI > MAX_HEIGHT:
        raise UserError("these are too many queries and plans for one picture; with --output '{image}.png' each gets its own")
    sheet = Picture(figsize=(width, height), dpi=DPI, facecolor=STYLE["paper"])

    def write(left: float, top: float, text: str, **style: Any) -> None:
        defaults: dict[str, Any] = {"fontsize": 8, "color": STYLE["ink"], "va": "top"}
        sheet.text(left / width, 1 - top / height, text, parse_math=False, **(defaults | style))

    def draw_object(images: Mapping[str, Image.Image], left: float, top: float, colour: str, line: float) -> None:
        """The modalities of one object, stacked in a frame."""
        for row, modality in enumerate(modalities):
            y = top + row * (high + 0.04)
            axis = sheet.add_axes((left / width, 1 - (y + high) / height, wide / width, high / height))
            axis.set_axis_off()
            if modality in images:
                axis.imshow(np.asarray(images[modality]), aspect="auto", interpolation="antialiased")
        border = 0.035
        sheet.add_artist(
            Rectangle(
                ((left - border) / width, 1 - (top + stack - 0.04 + border) / height),
                (wide + 2 * border) / width,
                (stack - 0.04 + 2 * border) / height,
                transform=sheet.transFigure,
                fill=False,
                edgecolor=colour,
                linewidth=line,
                joinstyle="miter",
            )
        )

    top = 0.12
    for strip, strip_height in zip(strips, heights, strict=True):
        write(GAP, top, f"{strip.name}: {strip.plan}", fontsize=10, fontweight="bold")
        for number, line in enumerate(strip.notes):
            write(GAP, top + 0.2 + LINE * number, line, fontsize=8.5, color=STYLE["soft"])
        y = top + 0.3 + LINE * len(strip.notes) + 0.2
        for row, modality in enumerate(modalities):
            middle = y + row * (high + 0.04) + high / 2
            write(margin - 0.14, middle, modality, rotation=90, ha="right", va="center", fontsize=8.5)
        left = margin
        write(left + wide / 2, y - 0.23, "query", ha="center", fontweight="bold")
        draw_object(strip.query, left, y, STYLE["ink"], 1.2)
        for number, line in enumerate(strip.about):
            write(left + wide / 2, y + stack + 0.07 + LINE * (number + 1), line, ha="center", fontsize=7, color=STYLE["soft"])
        left += column + apart
        for rank, one in enumerate(strip.hits, start=1):
            mark, colour = (TICK, RIGHT) if one.is_match else (CROSS, WRONG)
            write(left + wide / 2, y - 0.23, f"{rank} {mark}", ha="center", color=colour, fontweight="bold", fontsize=9)
            draw_object(one.images, left, y, colour, 2.4)
            write(left + wide / 2, y + stack + 0.07, f"{one.distance:.3f}", ha="center", fontsize=8)
            for number, line in enumerate(one.about):
                write(
                    left + wide / 2, y + stack + 0.07 + LINE * (number + 1), line, ha="center", fontsize=7, color=STYLE["soft"]
                )
            left += column
        top += strip_height
    key = f"{TICK} the same identity   {CROSS} another one   number below: squared distance of the features, of unit length"
    write(GAP, height - 0.26, key, color=STYLE["soft"])
    return sheet
