"""What a plan did to an image, as a picture: first the states of all patches at every cut, then their drawing.

Everything is told of the patches of the original raster and drawn at their place in the original image, whatever the tokens
of a later cut stand for: cuts are composed from the first on.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

from tokensieve.drawing.band import Band, as_image, make_band
from tokensieve.drawing.panels import STYLE, TINTS, axis_limits, draw_kept, draw_original, draw_scores, draw_shares, unseen_area
from tokensieve.drawing.stages import ANCHOR, DROPPED, FOLDED, GONE, MIXED, PICKED
from tokensieve.errors import UserError

if TYPE_CHECKING:
    from tokensieve.cutting.handle import Handle


DPI = 120
HIGHEST = 2**16 - 1  # pixels, the most that the drawing library can do


def picture(
    handle: Handle,
    image: Any,
    batch_index: int = 0,
    transform: Callable[[Any], Any] | None = None,
    name: str = "",
) -> Picture:
    """The last batch's image of this number under the handle's plan.

    image: the original as a file or a PIL image, with the transform that made the model's input of it; or without
    transform what the model saw, as a PIL image or as the input tensor (3, h, w).
    """
    return draw([make_band(handle, as_image(image), batch_index, transform, name=name)])


class Picture(Figure):
    """A matplotlib figure that shows itself in notebooks, whether pyplot is there or not."""

    def png(self) -> bytes:
        """As a PNG file."""
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # a file name in a script that the font does not have
            self.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


@dataclass(frozen=True)
class Panel:
    """One drawing with its caption; several of them under one heading stand side by side."""

    caption: str
    draw: Callable[..., None]  # of the axes, and of those of the colour bar where it has one
    bar: bool = False


@dataclass(frozen=True)
class Block:
    """A heading, remarks, and panels of one size: the image itself, or all that one plan did to it."""

    head: str
    told: list[str]
    panels: list[Panel]
    size: tuple[float, float]  # of a panel, in inches
    gap: float = 0.22  # inches between panels

    def wide(self) -> float:
        return len(self.panels) * (self.size[0] + self.gap) - self.gap + GAP


WIDEST = 15.2  # inches: five panels of a square image
GAP, LINE, CAPTION, BAR = 0.22, 0.17, 0.24, 0.34  # inches: between panels, a line of words, above and below a panel
LETTERS, BOLD = 12.5, 10.3  # in an inch


def draw(bands: Sequence[Band], brief: bool = False) -> Picture:
    """Each image, and beside it what each plan did: at every cut what it kept, and by which scores.

    brief: of each plan only what the last cut left.
    """
    return arrange(_rows(bands, brief), bands)


def arrange(rows: Sequence[list[Block]], bands: Sequence[Band]) -> Picture:
    """Rows of blocks in one picture, with a legend of the marks that occur in these bands."""
    width = max(6.0, GAP + max(sum(block.wide() for block in row) for row in rows))
    heights = [_height(row) for row in rows]
    columns = max(2, int(width // 1.58))  # of the legend
    height = 0.1 + sum(heights) + 0.14 + LINE * math.ceil(len(_entries(bands)) / columns)
    if height * DPI > HIGHEST:
        raise UserError(
            "these are too many images and plans for one picture; with --output '{image}.png' each image gets its own"
        )
    sheet = Picture(figsize=(width, height), dpi=DPI, facecolor=STYLE["paper"])

    def axes(left: float, top: float, wide: float, high: float) -> Any:
        return sheet.add_axes((left / width, 1 - (top + high) / height, wide / width, high / height))

    def say(left: float, top: float, words: str, **style: Any) -> None:
        sheet.text(left / width, 1 - top / height, words, va="top", parse_math=False, **style)

    top = 0.1
    for row, row_height in zip(rows, heights, strict=True):
        x = GAP
        start = top + max(_words(block) for block in row)  # all panels of a row begin at the same height
        for block in row:
            y = top + 0.06
            for line in _heading(block):
                say(x, y, line, fontsize=10, fontweight="bold", color=STYLE["ink"])
                y += LINE
            for line in _wrap_notes(block):
                say(x, y + 0.02, line, fontsize=8.5, color=STYLE["soft"])
                y += LINE
            wide, high = block.size
            for panel in block.panels:
                say(x, start + 0.05, panel.caption, fontsize=8.5, color=STYLE["ink"])
                axis = axes(x, start + CAPTION, wide, high)
                if panel.bar:
                    panel.draw(axis, axes(x, start + CAPTION + high + 0.06, wide, 0.09))
                else:
                    panel.draw(axis)
                x += wide + block.gap
            x += GAP - block.gap
        top += row_height
    legend(
        sheet, bands, loc="lower left", bbox_to_anchor=(GAP / width - 0.005, 0.02 / height), ncols=max(2, int(width // 1.75))
    )
    return sheet


def _rows(bands: Sequence[Band], brief: bool) -> list[list[Block]]:
    """Blocks side by side as far as they go; another image begins another row."""
    rows: list[list[Block]] = []
    last: Image.Image | None = None
    for one in bands:
        if one.image is not last:
            wide, high = one.image.size
            whole = Panel(f"{wide} × {high} pixels", partial(draw_original, band=one))
            rows.append([Block(one.name or "image", [], [whole], panel_size(one))])
            last = one.image
        for block in _blocks(one, brief):
            if GAP + sum(b.wide() for b in rows[-1]) + block.wide() > WIDEST:
                rows.append([])
            rows[-1].append(block)
    return rows


def _blocks(one: Band, brief: bool) -> list[Block]:
    """What a plan did; in several blocks where its panels do not fit into one row."""
    cuts: list[list[Panel]] = []
    for stage in one.stages[-1:] if brief else one.stages:
        place = where(stage.layer)
        counts = f"{place}: {stage.tokens_in} → {stage.tokens_out}"
        cuts.append([Panel(counts, partial(draw_kept, band=one, stage=stage))])
        if stage.scores is not None and not brief:
            cuts[-1].append(Panel(f"{place}: scores", partial(draw_scores, band=one, stage=stage), bar=True))
        if stage.shares is not None and not brief:
            cuts[-1].append(Panel(f"{place}: weights, %", partial(draw_shares, band=one, stage=stage), bar=True))
    if not cuts:
        cuts.append([Panel("every patch goes on", partial(draw_original, band=one))])
    blocks: list[Block] = []
    for panels in cuts:
        if not blocks or GAP + blocks[-1].wide() + len(panels) * (panel_size(one)[0] + GAP) > WIDEST:
            head = f"{one.plan}, continued" if blocks else one.plan
            blocks.append(Block(head, [] if blocks else [one.tokens, *one.notes], [], panel_size(one)))
        blocks[-1].panels.extend(panels)
    return blocks


def where(layer: str) -> str:
    """A layer of the ledger in words.

    >>> where("4"), where("4.attn"), where("out"), where("0"), where("llm.10")
    ('after block 4', 'inside block 4', 'output', 'before block 1', 'before LLM layer 10')
    """
    if layer.startswith("llm."):
        return f"before LLM layer {layer.removeprefix('llm.')}"
    if layer in ("out", "0"):
        return {"out": "output", "0": "before block 1"}[layer]
    return f"inside block {layer.removesuffix('.attn')}" if layer.endswith(".attn") else f"after block {layer}"


def _heading(block: Block) -> list[str]:
    return textwrap.wrap(block.head, int(BOLD * (block.wide() - GAP))) or [""]


def _wrap_notes(block: Block) -> list[str]:
    return [line for words in block.told for line in textwrap.wrap(words, int(LETTERS * (block.wide() - GAP)))]


def _words(block: Block) -> float:
    return 0.06 + LINE * (len(_heading(block)) + len(_wrap_notes(block)))


def _height(row: list[Block]) -> float:
    below = BAR if any(panel.bar for block in row for panel in block.panels) else 0.14
    return max(map(_words, row)) + CAPTION + max(block.size[1] for block in row) + below


def panel_size(one: Band) -> tuple[float, float]:
    """Width and height of a panel in inches: the same area for every shape, unless it is extreme."""
    left, right, bottom, top = axis_limits(one)
    shape = (right - left) / (bottom - top)
    wide, high = 2.75 * min(shape, 3.2) ** 0.5, 2.75 / max(shape, 0.3) ** 0.5
    return min(wide, high * shape), min(high, wide / shape)


def legend(sheet: Any, bands: Sequence[Band], **style: Any) -> None:
    """Explains the marks that occur in these bands."""
    style = {"fontsize": 8, "frameon": False, "handlelength": 1.2, "handleheight": 1.0, "labelcolor": STYLE["ink"]} | style
    if entries := _entries(bands):
        sheet.legend(handles=entries, **style)


def _entries(bands: Sequence[Band]) -> list[Any]:
    """A sample with its label for every kind of mark."""
    states = {int(state) for one in bands for stage in one.stages for state in np.unique(stage.states)}
    joint = any(stage.joint.any() for one in bands for stage in one.stages)
    alone = any(((stage.states == PICKED) & ~stage.joint).any() for one in bands for stage in one.stages)
    zeroed = all(one.zeroed for one in bands if one.stages)
    entries: list[Any] = []
    if ANCHOR in states:
        entries.append(Patch(facecolor="none", edgecolor=STYLE["anchor"], linewidth=2, label="anchor"))
    if alone:
        entries.append(Patch(facecolor="none", edgecolor=STYLE["picked"], linewidth=1.2, label="kept"))
    if MIXED in states:
        entries.append(Patch(facecolor="none", edgecolor=STYLE["mixed"], linewidth=1.2, label="selected and mixed"))
    if FOLDED in states:
        entries.append(Patch(facecolor=to_rgba(STYLE["folded"], 0.3), label="folded into one"))
    if joint:
        entries.append(Patch(facecolor=TINTS[1], edgecolor="#FFFFFF", label="one colour: one token"))
        dot: dict[str, Any] = {"marker": "o", "markersize": 4, "markeredgecolor": "#FFFFFF", "linestyle": "none"}
        entries.append(Line2D([], [], color=STYLE["ink"], label="stands for its group", **dot))
    if DROPPED in states:
        entries.append(Patch(facecolor="#D9D9D9", label="set to 0" if zeroed else "dropped"))
    if GONE in states:
        entries.append(Patch(facecolor="#8C8C8C", label="dropped at an earlier cut"))
    if any(unseen_area(one) for one in bands):
        entries.append(Patch(facecolor="#F2F2F2", edgecolor="#9A9A9A", hatch="/////", label="not seen by the model"))
    return entries
