"""A sheet: images, and beside each what plans did to it, as rows of panels with a legend.

Everything is drawn at the patches of the original grid, at their place in the original image, whatever the tokens of a later
cut consist of: cuts are composed from the first on.
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

from matplotlib.figure import Figure
from PIL import Image

from tokensieve.drawing.band import Band, as_image, make_band
from tokensieve.drawing.panels import ORIGINAL, STYLE, axis_limits, kinds_of
from tokensieve.drawing.registry import PANELS, PanelKind
from tokensieve.drawing.stages import Stage
from tokensieve.errors import UserError

if TYPE_CHECKING:
    from tokensieve.cutting.handle import Handle


DPI = 120
MAX_HEIGHT = 2**16 - 1  # pixels, the limit of matplotlib


def picture(
    handle: Handle,
    image: Any,
    batch_index: int = 0,
    transform: Callable[[Any], Any] | None = None,
    name: str = "",
) -> Picture:
    """One image of the handle's last batch under its plan.

    image: the original as a file or a PIL image, with the transform that made the model's input of it; or, without
    transform, the model's input, as a PIL image or as a tensor (3, h, w).
    """
    return draw([make_band(handle, as_image(image), batch_index, transform, name=name)])


class Picture(Figure):
    """A matplotlib figure that notebooks display without pyplot."""

    def png(self) -> bytes:
        """As a PNG file."""
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # a file name with characters that the font lacks
            self.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


@dataclass(frozen=True)
class Panel:
    """One drawing with its caption; several of them under one heading stand side by side."""

    caption: str
    draw: Callable[..., None]  # called with the axes, and those of the colour bar where it has one
    has_color_bar: bool = False


def image_panel(caption: str, band: Band) -> Panel:
    """The image as it is."""
    return Panel(caption, partial(ORIGINAL.draw, band=band))


def cut_panel(caption: str, kind: PanelKind, band: Band, stage: Stage) -> Panel:
    """What one cut did to the image, drawn as this kind."""
    return Panel(caption, partial(kind.draw, band=band, stage=stage), kind.has_color_bar)


@dataclass(frozen=True)
class Block:
    """A heading, notes, and panels of one size: the image itself, or all that one plan did to it."""

    heading: str
    notes: list[str]
    panels: list[Panel]
    size: tuple[float, float]  # of a panel, in inches
    gap: float = 0.22  # inches between panels

    def width(self) -> float:
        return len(self.panels) * (self.size[0] + self.gap) - self.gap + GAP


MAX_WIDTH = 15.2  # inches: five panels of a square image
GAP, LINE, CAPTION, BAR = 0.22, 0.17, 0.24, 0.34  # inches: between panels, a line of words, above and below a panel
LETTERS, BOLD = 12.5, 10.3  # in an inch


def draw(bands: Sequence[Band], brief: bool = False) -> Picture:
    """Each image, and beside it what each plan did: at every cut what it kept, and its scores.

    brief: only what the last cut of each plan left.
    """
    return arrange(_rows(bands, brief), bands)


def arrange(rows: Sequence[list[Block]], bands: Sequence[Band]) -> Picture:
    """Rows of blocks in one picture, with a legend of the marks that occur in these bands."""
    width = max(6.0, GAP + max(sum(block.width() for block in row) for row in rows))
    heights = [_height(row) for row in rows]
    columns = max(2, int(width // 1.58))  # of the legend
    height = 0.1 + sum(heights) + 0.14 + LINE * math.ceil(len(legend_entries(bands)) / columns)
    if height * DPI > MAX_HEIGHT:
        raise UserError(
            "these are too many images and plans for one picture; with --output '{image}.png' each image gets its own"
        )
    sheet = Picture(figsize=(width, height), dpi=DPI, facecolor=STYLE["paper"])

    def axes(left: float, top: float, wide: float, high: float) -> Any:
        return sheet.add_axes((left / width, 1 - (top + high) / height, wide / width, high / height))

    def write(left: float, top: float, text: str, **style: Any) -> None:
        sheet.text(left / width, 1 - top / height, text, va="top", parse_math=False, **style)

    top = 0.1
    for row, row_height in zip(rows, heights, strict=True):
        x = GAP
        start = top + max(_text_height(block) for block in row)  # all panels of a row begin at the same height
        for block in row:
            y = top + 0.06
            for line in _wrap_heading(block):
                write(x, y, line, fontsize=10, fontweight="bold", color=STYLE["ink"])
                y += LINE
            for line in _wrap_notes(block):
                write(x, y + 0.02, line, fontsize=8.5, color=STYLE["soft"])
                y += LINE
            wide, high = block.size
            for panel in block.panels:
                write(x, start + 0.05, panel.caption, fontsize=8.5, color=STYLE["ink"])
                axis = axes(x, start + CAPTION, wide, high)
                if panel.has_color_bar:
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
    """A row for each plan: the image, then its cuts as long as they fit. brief: plans share a row with their image."""
    rows: list[list[Block]] = []
    last: Image.Image | None = None
    for one in bands:
        if one.image is not last or not brief:
            wide, high = one.image.size
            rows.append([Block(one.name or "image", [], [image_panel(f"{wide} × {high} pixels", one)], panel_size(one))])
            last = one.image
        for block in _blocks(one, brief):
            if GAP + sum(b.width() for b in rows[-1]) + block.width() > MAX_WIDTH:
                rows.append([])
            rows[-1].append(block)
    return rows


def _blocks(one: Band, brief: bool) -> list[Block]:
    """What a plan did, in several blocks where its panels do not fit into one row."""
    cuts: list[list[Panel]] = []
    for stage in one.stages[-1:] if brief else one.stages:
        captions = {kind: f"{where(stage.layer)}: {kind.caption.format(stage=stage)}" for kind in kinds_of(stage, brief)}
        cuts.append([cut_panel(caption, kind, one, stage) for kind, caption in captions.items()])
    if not cuts:
        cuts.append(
            [image_panel("all patches are kept" if one.resized is None else "a smaller image, all patches are kept", one)]
        )
    blocks: list[Block] = []
    for panels in cuts:
        if not blocks or GAP + blocks[-1].width() + len(panels) * (panel_size(one)[0] + GAP) > MAX_WIDTH:
            heading = f"{one.plan}, continued" if blocks else one.plan
            blocks.append(Block(heading, [] if blocks else [one.tokens, *one.notes], [], panel_size(one)))
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


def _wrap_heading(block: Block) -> list[str]:
    return textwrap.wrap(block.heading, int(BOLD * (block.width() - GAP))) or [""]


def _wrap_notes(block: Block) -> list[str]:
    return [line for note in block.notes for line in textwrap.wrap(note, int(LETTERS * (block.width() - GAP)))]


def _text_height(block: Block) -> float:
    return 0.06 + LINE * (len(_wrap_heading(block)) + len(_wrap_notes(block)))


def _height(row: list[Block]) -> float:
    below = BAR if any(panel.has_color_bar for block in row for panel in block.panels) else 0.14
    return max(map(_text_height, row)) + CAPTION + max(block.size[1] for block in row) + below


def panel_size(one: Band) -> tuple[float, float]:
    """Width and height of a panel in inches: the same area for every shape, unless it is extreme."""
    left, right, bottom, top = axis_limits(one)
    shape = (right - left) / (bottom - top)
    wide, high = 2.75 * min(shape, 3.2) ** 0.5, 2.75 / max(shape, 0.3) ** 0.5
    return min(wide, high * shape), min(high, wide / shape)


def legend(sheet: Any, bands: Sequence[Band], **style: Any) -> None:
    """Add a legend of the marks that occur in these bands."""
    style = {"fontsize": 8, "frameon": False, "handlelength": 1.2, "handleheight": 1.0, "labelcolor": STYLE["ink"]} | style
    if entries := legend_entries(bands):
        sheet.legend(handles=entries, **style)


def legend_entries(bands: Sequence[Band]) -> list[Any]:
    """The entries of all kinds of panels for the marks in these bands."""
    return [entry for kind in PANELS.values() for entry in kind.legend(bands)]
