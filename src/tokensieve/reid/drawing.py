"""Pictures of re-identification: what plans keep of an object in each of its modalities, and whom they find in a gallery.

Of an object every plan has one row: its images side by side with the patches that go on, then the scores, then, where a method
mixes patches, the weights. Of a query every plan has one strip: the nearest of the gallery from left to right, right ones with
a tick in a green frame, wrong ones with a cross in an orange one, so that nothing is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle
from PIL import Image

from tokensieve.cutting.handle import Handle
from tokensieve.drawing import band as drawing_band
from tokensieve.drawing import stages
from tokensieve.drawing.band import Band
from tokensieve.drawing.geometry import Frame
from tokensieve.drawing.panels import STYLE, draw_kept, draw_original, draw_scores, draw_shares
from tokensieve.drawing.sheet import DPI, GAP, HIGHEST, LINE, WIDEST, Block, Panel, Picture, arrange, panel_size, where
from tokensieve.errors import UserError

RIGHT, WRONG = "#009E73", "#D55E00"  # told apart by every common kind of colour blindness
NARROW = 0.08  # inches between the modalities of one object
LOWEST = 1.0  # inches that a panel is high, unless its images are very wide
TICK, CROSS = "\N{CHECK MARK}", "\N{BALLOT X}"


# --------------------------------------------------------------------------------------------------- one object under plans


@dataclass(frozen=True)
class ObjectPicture:
    """One object under one plan."""

    name: str
    about: str  # who it is and who saw it, as far as that is known
    bands: dict[str, Band]  # by modality


def see(
    handle: Handle,
    images: Mapping[str, Image.Image],
    *,
    size: tuple[int, int],
    grid: tuple[int, int],
    name: str,
    about: str = "",
) -> ObjectPicture:
    """What the handle's plan did to the object that was its last batch, whose rows are the object's modalities in this order.

    size: (h, w) of the model's input, to which whole images are resized.
    """
    bands = {}
    for row, (modality, image) in enumerate(images.items()):
        frame = Frame(0, 0, *image.size, size=size)
        bands[modality] = drawing_band.make_band(handle, image, row, frame=frame, grid=grid, name=f"{name} {modality}")
    return ObjectPicture(name, about, bands)


def draw(seen: Sequence[ObjectPicture]) -> Picture:
    """Every object at the left, and beside it what each plan did: as many plans in a row as fit.

    Wide images would be tiny so: of them two blocks stand side by side.
    """
    bands = [band for one in seen for band in one.bands.values()]
    columns = 1 + max(len(kinds) for one in seen for kinds in _by_cut(one))  # the object itself, and the most beside it
    size = _panel_size(bands, columns, max(len(one.bands) for one in seen))
    below = size[1] >= LOWEST  # what plans did to an object stands below each other, not below the object
    if not below:
        columns = 2
        size = _panel_size(bands, columns, max(len(one.bands) for one in seen))
    rows: list[list[Block]] = []
    last: ObjectPicture | None = None
    for one in seen:
        if last is None or last.name != one.name:
            whole = [Panel(modality, partial(draw_original, band=band)) for modality, band in one.bands.items()]
            rows.append([Block(one.name, [one.about] if one.about else [], whole, size, NARROW)])
        last = one
        for kinds in _by_cut(one):
            for number, (head, told, panels) in enumerate(kinds):
                together = len(kinds) if below and number == 0 else 1
                if len(rows[-1]) + together > columns:
                    blank = [Panel("", lambda axis: axis.set_axis_off()) for _ in one.bands]
                    rows.append([Block("", [], blank, size, NARROW)] if below else [])
                rows[-1].append(Block(head, told, panels, size, NARROW))
    return arrange(rows, bands)


def _panel_size(bands: Sequence[Band], columns: int, modalities: int) -> tuple[float, float]:
    """Width and height in inches, such that so many blocks of so many modalities fit side by side."""
    wide, high = (max(side) for side in zip(*map(panel_size, bands), strict=True))
    room = (WIDEST - GAP * (columns + 1) + NARROW * columns) / (columns * modalities) - NARROW
    shrink = min(1.0, room / wide)
    return wide * shrink, high * shrink


Kind = tuple[str, list[str], list[Panel]]  # heading, remarks, a panel for each modality


def _by_cut(one: ObjectPicture) -> list[list[Kind]]:
    """For every cut what is drawn of it side by side; without any the images as they are."""
    first = next(iter(one.bands.values()))
    if not first.stages:
        whole = [Panel(modality, partial(draw_original, band=band)) for modality, band in one.bands.items()]
        return [[(first.plan, [f"{first.tokens} of each modality", *first.notes], whole)]]
    return [_of_cut(one, number) for number in range(len(first.stages))]


def _of_cut(one: ObjectPicture, number: int) -> list[Kind]:
    """What went on, by which scores, and where patches are mixed, with which weights."""
    first = next(iter(one.bands.values()))
    stage = first.stages[number]
    told = [f"{where(stage.layer)}: {stage.tokens_in} → {stage.tokens_out} tokens each"]
    if stage.shares is not None:
        mixed, folded = (int((stage.states == state).sum()) for state in (stages.MIXED, stages.FOLDED))
        told.append(f"{mixed} mixed into {stage.tokens_out - 1}, {folded} folded into 1")

    def panels(drawing: Callable[..., None], bar: bool = True) -> list[Panel]:
        return [
            Panel(modality, partial(drawing, band=band, stage=band.stages[number]), bar) for modality, band in one.bands.items()
        ]

    head = first.plan if number == 0 else f"{first.plan}, continued"
    kinds: list[Kind] = [(head, told + (first.notes if number == 0 else []), panels(draw_kept, bar=False))]
    if stage.scores is not None:
        kinds.append(("scores", ["by which patches were chosen"], panels(draw_scores)))
    if stage.shares is not None:
        kinds.append(("weights", ["of the patches in the mean token, %"], panels(draw_shares)))
    return kinds


# ------------------------------------------------------------------------------------------------------- the nearest of many


@dataclass(frozen=True)
class GalleryHit:
    """One of the gallery, at its place in the ranking."""

    images: Mapping[str, Image.Image]
    about: list[str]  # lines below it
    distance: float
    right: bool


@dataclass(frozen=True)
class Strip:
    """The nearest of the gallery under one plan."""

    plan: str
    told: list[str]
    name: str
    query: Mapping[str, Image.Image]
    about: list[str]  # lines below the query
    found: list[GalleryHit] = field(default_factory=list)


SPACE = 0.14  # inches between neighbours


def draw_gallery(strips: Sequence[Strip]) -> Picture:
    """A strip for every plan: the query, and beside it the nearest of the gallery, their modalities above each other."""
    everything = [images for strip in strips for images in (strip.query, *(one.images for one in strip.found))]
    modalities = list(dict.fromkeys(name for images in everything for name in images))
    shape = float(np.median([image.width / image.height for images in everything for image in images.values()]))
    wide, high = 0.98 * math.sqrt(shape), 0.98 / math.sqrt(shape)
    columns = max(len(strip.found) for strip in strips) + 1
    lines = max(len(about) for strip in strips for about in (strip.about, *(one.about for one in strip.found)))
    margin, apart = GAP + 0.3, 0.3  # room for the modalities' names; between query and gallery
    column = max(wide, 0.66) + SPACE  # words below need some room
    width = max(6.0, margin + columns * column + apart + GAP)
    stack = len(modalities) * (high + 0.04)
    heights = [0.3 + LINE * len(strip.told) + 0.24 + stack + 0.1 + LINE * (lines + 1) for strip in strips]
    height = sum(heights) + 0.42
    if height * DPI > HIGHEST:
        raise UserError("these are too many queries and plans for one picture; with --output '{image}.png' each gets its own")
    sheet = Picture(figsize=(width, height), dpi=DPI, facecolor=STYLE["paper"])

    def say(left: float, top: float, words: str, **style: Any) -> None:
        usual: dict[str, Any] = {"fontsize": 8, "color": STYLE["ink"], "va": "top"}
        sheet.text(left / width, 1 - top / height, words, parse_math=False, **(usual | style))

    def stand(images: Mapping[str, Image.Image], left: float, top: float, colour: str, line: float) -> None:
        """The modalities of one object above each other in a frame."""
        for place, modality in enumerate(modalities):
            y = top + place * (high + 0.04)
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
        say(GAP, top, f"{strip.name}: {strip.plan}", fontsize=10, fontweight="bold")
        for number, words in enumerate(strip.told):
            say(GAP, top + 0.2 + LINE * number, words, fontsize=8.5, color=STYLE["soft"])
        y = top + 0.3 + LINE * len(strip.told) + 0.2
        for place, modality in enumerate(modalities):
            middle = y + place * (high + 0.04) + high / 2
            say(margin - 0.14, middle, modality, rotation=90, ha="right", va="center", fontsize=8.5)
        left = margin
        say(left + wide / 2, y - 0.23, "query", ha="center", fontweight="bold")
        stand(strip.query, left, y, STYLE["ink"], 1.2)
        for number, words in enumerate(strip.about):
            say(left + wide / 2, y + stack + 0.07 + LINE * (number + 1), words, ha="center", fontsize=7, color=STYLE["soft"])
        left += column + apart
        for rank, one in enumerate(strip.found, start=1):
            mark, colour = (TICK, RIGHT) if one.right else (CROSS, WRONG)
            say(left + wide / 2, y - 0.23, f"{rank} {mark}", ha="center", color=colour, fontweight="bold", fontsize=9)
            stand(one.images, left, y, colour, 2.4)
            say(left + wide / 2, y + stack + 0.07, f"{one.distance:.3f}", ha="center", fontsize=8)
            for number, words in enumerate(one.about):
                say(
                    left + wide / 2, y + stack + 0.07 + LINE * (number + 1), words, ha="center", fontsize=7, color=STYLE["soft"]
                )
            left += column
        top += strip_height
    said = f"{TICK} the same identity   {CROSS} another one   number below: squared distance of the features, of unit length"
    say(GAP, height - 0.26, said, color=STYLE["soft"])
    return sheet
