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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.path import Path as Outline
from PIL import Image

from tokensieve.core import Reduction
from tokensieve.data.images import BrokenImage, open_image
from tokensieve.errors import UserError
from tokensieve.geometry import Frame, find_frame

if TYPE_CHECKING:
    from tokensieve.handle import Handle

# States of a patch at a cut: lost earlier, lost here, or going on. Where a method chooses patches and then mixes all of them in
# each of its tokens, those that it chose are MIXED, and those that it sums up in one more token are FOLDED.
GONE, DROPPED, MERGED, PICKED, ANCHOR, FOLDED, MIXED = range(7)

# Colours that differ for every common kind of colour blindness (Okabe and Ito's), and a map that does (viridis).
STYLE: dict[str, str] = {"anchor": "#D55E00", "picked": "#0072B2", "paper": "#FFFFFF", "ink": "#1A1A1A", "soft": "#6B6B6B"}
STYLE |= {"mixed": "#009E73", "folded": "#CC79A7"}
TINTS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#332288", "#A6761D", "#882255")
HEAT = "viridis"
SHARPEST = 1400  # pixels on a side beyond which no picture gets sharper
DPI = 120
HIGHEST = 2**16 - 1  # pixels, the most that the drawing library can do


# ------------------------------------------------------------------------------------------------------------- what was done


@dataclass(frozen=True)
class Stage:
    """One cut, told of the N patches of the original raster."""

    layer: str  # as in the ledger: "4", "4.attn" or "out"
    tokens_in: int
    tokens_out: int
    states: np.ndarray  # (N,), GONE ... ANCHOR; a merged token is PICKED or ANCHOR at the patch that stands for it
    groups: np.ndarray  # (N,), the output token each patch is part of, -1 where it is lost
    scores: np.ndarray | None  # (N,), of the token that each patch was part of before the cut; NaN where it was lost by then
    shares: np.ndarray | None = None  # (N,), of each patch in the mean of all tokens, where every token mixes many patches

    @property
    def joint(self) -> np.ndarray:
        """(N,), whether a patch goes on together with others, in one group of them."""
        if self.shares is not None:
            return np.zeros(len(self.groups), dtype=bool)
        sizes = np.bincount(self.groups[self.groups >= 0], minlength=self.tokens_out)
        return (self.groups >= 0) & (sizes[self.groups] > 1)


def stages(handle: Handle, batch_index: int = 0) -> list[Stage]:
    """Every cut of the handle's last batch for one of its images, in order."""
    made: list[Stage] = []
    if handle.stages and handle.reduction is None:
        raise UserError("patch dropout left no raster to draw in; call model.eval() and run the batch again")
    before: Reduction | None = None
    for layer, batched in handle.stages:
        here = _of_one(batched, batch_index)
        n = before.n if before is not None else here.n
        arrived = before.groups[0] if before is not None else torch.arange(n)  # (N,), the token that each patch is part of
        standing = before.index[0] if before is not None else torch.arange(n)  # (tokens,), the patch that stands for each
        after = here if before is None else before.then(here)
        states = torch.full((n,), DROPPED)
        states[after.groups[0] >= 0] = MERGED
        states[arrived < 0] = GONE
        states[after.index[0]] = PICKED
        if here.anchors is not None:
            kept = here.anchors[0][torch.isin(here.anchors[0], here.index[0])]
            states[standing[kept]] = ANCHOR
        shares = None
        if (mixture := _mixture(here)) is not None:
            rows = after.as_weight()[0]  # (tokens, N)
            states = torch.where(rows.sum(0) > 0, FOLDED, DROPPED)
            states[torch.isin(arrived, mixture)] = MIXED
            states[arrived < 0] = GONE
            shares = rows.mean(0).numpy()
        scores = None
        if here.scores is not None:
            scores = here.scores[0].float()[arrived.clamp_min(0)].masked_fill(arrived < 0, torch.nan).numpy()
        made.append(Stage(layer, here.n, here.k, states.numpy(), after.groups[0].numpy(), scores, shares))
        before = after
    return made


def _mixture(reduction: Reduction) -> torch.Tensor | None:
    """The tokens (A,) that a method chose before it mixed them, where it did: every one is part of several new tokens."""
    if reduction.weight is None or reduction.anchors is None or not ((reduction.weight[0] > 0).sum(0) > 1).any():
        return None
    return reduction.anchors[0]


def _of_one(reduction: Reduction, number: int) -> Reduction:
    """The reduction of a single image of the batch, on the CPU."""
    if not -len(reduction.index) <= number < len(reduction.index):
        raise UserError(f"batch_index {number}: the last batch had {len(reduction.index)} images")
    tensors: dict[str, Any] = {name: value for name, value in vars(reduction).items() if isinstance(value, torch.Tensor)}
    return replace(reduction, **{name: value[number][None].detach().cpu() for name, value in tensors.items()})


# ----------------------------------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True)
class Band:
    """One image under one plan: what makes one row of panels."""

    image: Image.Image
    frame: Frame
    plan: str
    stages: list[Stage]
    grid: tuple[int, int] | None  # None: not known, so no grid is drawn
    name: str = ""  # of the image
    notes: list[str] = field(default_factory=list)
    zeroed: bool = False  # the last cut sets to 0 what it does not keep

    @property
    def patches(self) -> np.ndarray:
        """(N, 4) in pixels of the image."""
        assert self.grid is not None
        return self.frame.patches(self.grid)

    @property
    def tokens(self) -> str:
        if self.stages:
            return f"{self.stages[0].tokens_in} → {self.stages[-1].tokens_out} patch tokens"
        return f"all {self.grid[0] * self.grid[1]} patch tokens" if self.grid else "all patch tokens"


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
    return draw([band(handle, as_image(image), batch_index, transform, name=name)])


def band(
    handle: Handle,
    image: Image.Image,
    batch_index: int = 0,
    transform: Callable[[Any], Any] | None = None,
    *,
    frame: Frame | None = None,
    grid: tuple[int, int] | None = None,
    name: str = "",
) -> Band:
    """All that is needed to draw one image of the handle's last batch; frame saves finding it again for every plan."""
    if frame is None:
        frame = find_frame(transform, image.size) if transform else Frame(0, 0, *image.size)
    return Band(
        image=image,
        frame=frame,
        plan=str(handle.plan),
        stages=stages(handle, batch_index),
        grid=handle.grid or grid,
        name=name,
        notes=list(handle.notes),
        zeroed=any(step.rest == "zero" for step in handle.plan.steps),
    )


def as_image(image: Any) -> Image.Image:
    """A file, a PIL image or a tensor (3, h, w) as a PIL image in RGB; a tensor's values are stretched to all shades."""
    if isinstance(image, (str, Path)):
        try:
            return open_image(image)
        except BrokenImage as error:
            raise UserError(f"cannot read {image}: {error}") from error
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if isinstance(image, torch.Tensor) and image.dim() == 3 and image.shape[0] == 3:
        values = image.detach().float().cpu()
        low, high = values.min(), values.max()
        shades = (values - low) / (high - low).clamp_min(1e-12) * 255
        return Image.fromarray(shades.round().byte().permute(1, 2, 0).numpy())
    shape = f" of shape {tuple(image.shape)}" if hasattr(image, "shape") else ""
    raise UserError(f"a {type(image).__name__}{shape} is not an image: give a file, a PIL image or a tensor (3, h, w)")


# ------------------------------------------------------------------------------------------------------------------ panels


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


def draw_original(axis: Any, band: Band) -> None:
    """The image with the grid of its patches, and what the model does not see of it."""
    _place(axis, band)
    _show(axis, band, _pixels(band.image))
    if band.grid is not None:
        _outline(axis, band.patches, "#FFFFFF", 0.4, alpha=0.55)
    _veil(axis, band)


def draw_kept(axis: Any, band: Band, stage: Stage | None) -> None:
    """Anchors and picked patches in full, the others faded; patches that go on as one in one colour."""
    if stage is None:
        return draw_original(axis, band)
    _place(axis, band)
    patches, states, joint = band.patches, stage.states, stage.joint
    pixels = _pixels(band.image)
    grey = pixels.mean(axis=2, keepdims=True).repeat(3, axis=2)
    _show(axis, band, 0.22 * grey + 0.78 * 0.86)
    _fill(axis, patches[states == GONE], "#8C8C8C", 0.75)
    _fill(axis, patches[states == FOLDED], STYLE["folded"], 0.3)
    going_on = patches[states == MIXED] if stage.shares is not None else patches[stage.groups >= 0]
    if len(going_on):
        _show(axis, band, pixels).set_clip_path(_path(going_on), axis.transData)
    if joint.any():
        colours = _tints(stage.groups, joint, band.grid)
        axis.add_collection(PolyCollection(_corners(patches[joint]), facecolors=[to_rgba(c, 0.62) for c in colours[joint]]))
        axis.add_collection(LineCollection(_borders(patches, stage.groups, band.grid), colors="#FFFFFF", linewidths=0.9))
        middles = patches.reshape(-1, 2, 2).mean(axis=1)  # (N, 2)
        links = middles[_links(stage, colours, band.grid)]
        axis.add_collection(LineCollection(list(links), colors=STYLE["ink"], linewidths=0.5, alpha=0.45))
        axis.plot(
            *middles[joint & (states == PICKED)].T,
            "o",
            color=STYLE["ink"],
            markersize=3.2,
            markeredgecolor="#FFFFFF",
            markeredgewidth=0.7,
        )
    _outline(axis, patches[(states == PICKED) & ~joint], STYLE["picked"], 1.0, inset=0.05)
    _outline(axis, patches[states == MIXED], STYLE["mixed"], 0.8, inset=0.05)
    _outline(axis, patches[states == ANCHOR], STYLE["anchor"], 2.0, inset=0.09)
    _veil(axis, band)


def draw_scores(axis: Any, bar: Any, band: Band, stage: Stage) -> None:
    """The scores as a heat map over the grey image, with a colour bar in the axes bar."""
    assert stage.scores is not None
    draw_heat(axis, bar, band, stage.scores)


def draw_shares(axis: Any, bar: Any, band: Band, stage: Stage) -> None:
    """How many percent of the mean of all tokens each patch makes up, as a heat map."""
    assert stage.shares is not None
    draw_heat(axis, bar, band, np.where(stage.states == GONE, np.nan, 100 * stage.shares))


def draw_heat(axis: Any, bar: Any, band: Band, values: np.ndarray) -> None:
    """Numbers (N,) of the patches, NaN for none, in colour over the grey image."""
    assert band.grid is not None
    _place(axis, band)
    _show(axis, band, _pixels(band.image).mean(axis=2, keepdims=True).repeat(3, axis=2))
    there = np.isfinite(values)
    low, high = float(np.min(values[there])), float(np.max(values[there]))
    heat = PolyCollection(_corners(band.patches[there]), array=values[there], cmap=HEAT, alpha=0.72)
    heat.set_clim(low, high if high > low else low + 1e-6)
    axis.add_collection(heat)
    _fill(axis, band.patches[~there], "#E6E6E6", 0.85)
    _veil(axis, band)
    axis.figure.colorbar(heat, cax=bar, orientation="horizontal", ticks=[low, high] if high > low else [low])
    bar.set_xticklabels([f"{value:.3g}" for value in ([low, high] if high > low else [low])], fontsize=7, color=STYLE["soft"])
    bar.tick_params(length=0, pad=2)
    bar.xaxis.get_ticklabels()[0].set_horizontalalignment("left")
    bar.xaxis.get_ticklabels()[-1].set_horizontalalignment("right")
    bar.set_frame_on(False)


# --------------------------------------------------------------------------------------------------------------- the sheet


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
            for line in _told(block):
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


def _told(block: Block) -> list[str]:
    return [line for words in block.told for line in textwrap.wrap(words, int(LETTERS * (block.wide() - GAP)))]


def _words(block: Block) -> float:
    return 0.06 + LINE * (len(_heading(block)) + len(_told(block)))


def _height(row: list[Block]) -> float:
    below = BAR if any(panel.bar for block in row for panel in block.panels) else 0.14
    return max(map(_words, row)) + CAPTION + max(block.size[1] for block in row) + below


def panel_size(one: Band) -> tuple[float, float]:
    """Width and height of a panel in inches: the same area for every shape, unless it is extreme."""
    left, right, bottom, top = _limits(one)
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
    if any(_unseen(one) for one in bands):
        entries.append(Patch(facecolor="#F2F2F2", edgecolor="#9A9A9A", hatch="/////", label="not seen by the model"))
    return entries


# ------------------------------------------------------------------------------------------------------------ small drawing


def _pixels(image: Image.Image) -> np.ndarray:
    """(h, w, 3) from 0 to 1, no larger than can be seen."""
    longest = max(image.size)
    if longest > SHARPEST:
        image = image.resize([max(1, round(side * SHARPEST / longest)) for side in image.size], Image.Resampling.LANCZOS)
    return np.asarray(image, dtype=np.float32) / 255


def _limits(one: Band) -> tuple[float, float, float, float]:
    """left, right, bottom, top of what is shown: the image, and padding where the model saw some."""
    (wide, high), f = one.image.size, one.frame
    x, y = sorted((f.left, f.right)), sorted((f.top, f.bottom))
    slack = 0.01 * max(wide, high)
    left, right = (x[0] if x[0] < -slack else 0), (x[1] if x[1] > wide + slack else wide)
    top, bottom = (y[0] if y[0] < -slack else 0), (y[1] if y[1] > high + slack else high)
    return left, right, bottom, top


def _place(axis: Any, one: Band) -> None:
    left, right, bottom, top = _limits(one)
    axis.set(xlim=(left, right), ylim=(bottom, top), aspect="equal", anchor="NW", xticks=[], yticks=[])
    axis.set_facecolor("#F2F2F2")
    for side in axis.spines.values():
        side.set(color="#C8C8C8", linewidth=0.6)


def _show(axis: Any, one: Band, pixels: np.ndarray) -> Any:
    limits = axis.get_xlim(), axis.get_ylim()
    wide, high = one.image.size
    shown = axis.imshow(pixels.clip(0, 1), extent=(0, wide, high, 0), aspect="equal", interpolation="antialiased")
    axis.set(xlim=limits[0], ylim=limits[1])
    return shown


def _corners(patches: np.ndarray) -> Any:
    """(M, 4) -> (M, 4, 2), the corners in turn."""
    left, top, right, bottom = patches.T
    return np.stack([np.stack(xy, axis=-1) for xy in ((left, top), (right, top), (right, bottom), (left, bottom))], axis=1)


def _path(patches: np.ndarray) -> Outline:
    return Outline.make_compound_path(
        *(Outline(np.vstack([corners, corners[:1]]), closed=True) for corners in _corners(patches))
    )


def _fill(axis: Any, patches: np.ndarray, colour: str, alpha: float) -> None:
    axis.add_collection(PolyCollection(_corners(patches), facecolors=[to_rgba(colour, alpha)], linewidths=0))


def _outline(axis: Any, patches: np.ndarray, colour: str, width: float, inset: float = 0.0, alpha: float = 1.0) -> None:
    """Outlines within the patches, so that those of neighbours do not cover each other."""
    side = (patches[:, 2:] - patches[:, :2]) * inset
    inner = patches + np.hstack([side, -side])
    axis.add_collection(
        PolyCollection(
            _corners(inner), facecolors="none", edgecolors=[to_rgba(colour, alpha)], linewidths=width, joinstyle="miter"
        )
    )


def _borders(patches: np.ndarray, groups: np.ndarray, grid: tuple[int, int] | None) -> list[np.ndarray]:
    """The lines between neighbouring patches of different groups."""
    assert grid is not None
    corners = _corners(patches).reshape(*grid, 4, 2)
    group = groups.reshape(grid)
    beside, below = group[:, 1:] != group[:, :-1], group[1:] != group[:-1]
    return [*corners[:, 1:][beside][:, [0, 3]], *corners[1:][below][:, [0, 1]]]


def _tints(groups: np.ndarray, joint: np.ndarray, grid: tuple[int, int] | None) -> np.ndarray:
    """(N,) a colour for each patch: groups that touch, even at a corner, have different ones as long as there are enough."""
    assert grid is not None
    group = np.where(joint, groups, -1).reshape(grid)
    touching: dict[int, set[int]] = {int(g): set() for g in np.unique(group) if g >= 0}
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        a = group[: grid[0] - down, max(0, -right) : grid[1] - max(0, right)]
        b = group[down:, max(0, right) : grid[1] + min(0, right)]
        for one, other in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True):
            if one != other and one >= 0 and other >= 0:
                touching[one].add(other)
                touching[other].add(one)
    chosen: dict[int, int] = {}
    used = [0] * len(TINTS)
    for one in sorted(touching, key=lambda g: -len(touching[g])):
        taken = {chosen[other] for other in touching[one] if other in chosen}
        free = [tint for tint in range(len(TINTS)) if tint not in taken] or list(range(len(TINTS)))
        chosen[one] = min(free, key=lambda tint: used[tint])
        used[chosen[one]] += 1
    return np.array([TINTS[chosen[g]] if g in chosen else "" for g in group.ravel().tolist()], dtype=object)


def _links(stage: Stage, colours: np.ndarray, grid: tuple[int, int] | None) -> np.ndarray:
    """(L, 2) pairs of patches to join by lines, so that groups of the same colour can be told apart.

    Each piece of a group that does not touch the patch that stands for it is joined to that patch.
    """
    assert grid is not None
    shared = {c for c in set(colours[stage.joint]) if len(set(stage.groups[stage.joint & (colours == c)])) > 1}
    links: list[tuple[int, int]] = []
    for group in np.unique(stage.groups[stage.joint]):
        members = set(np.flatnonzero(stage.groups == group).tolist())
        heads = [patch for patch in members if stage.states[patch] in (PICKED, ANCHOR)]
        if not heads or colours[heads[0]] not in shared:
            continue
        start: int | None = heads[0]
        while start is not None:
            if start != heads[0]:
                links.append((start, heads[0]))
            piece = [start]
            while piece:
                patch = piece.pop()
                members.discard(patch)
                row, column = divmod(patch, grid[1])
                around = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
                piece += [r * grid[1] + c for r, c in around if 0 <= c < grid[1] and r * grid[1] + c in members]
            start = min(members, default=None)
    return np.array(links, dtype=int).reshape(-1, 2)


def _unseen(one: Band) -> list[tuple[float, float, float, float]]:
    """The parts of the image that the patches do not cover: (left, top, right, bottom)."""
    wide, high = one.image.size
    x, y = sorted((one.frame.left, one.frame.right)), sorted((one.frame.top, one.frame.bottom))
    if one.grid is not None:
        x, y = [one.patches[:, 0].min(), one.patches[:, 2].max()], [one.patches[:, 1].min(), one.patches[:, 3].max()]
    strips = [(0, 0, x[0], high), (x[1], 0, wide, high), (x[0], 0, x[1], y[0]), (x[0], y[1], x[1], high)]
    return [s for s in strips if s[2] - s[0] > 0.008 * wide and s[3] - s[1] > 0.008 * high]


def _veil(axis: Any, one: Band) -> None:
    for left, top, right, bottom in _unseen(one):
        box = (left, top), right - left, bottom - top
        axis.add_patch(Rectangle(*box, facecolor=to_rgba("#F2F2F2", 0.72), edgecolor="#9A9A9A", hatch="/////", linewidth=0))
