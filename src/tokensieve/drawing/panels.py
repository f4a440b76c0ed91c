"""The kinds of panels: the image, the patches a cut keeps, its scores, and the shares of patches in mixed tokens.

Each kind is declared with its legend entries at the end of this file. A plug-in may add another kind to PANELS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.path import Path as Outline
from PIL import Image

from tokensieve.drawing.band import Band
from tokensieve.drawing.registry import PANELS, PanelKind
from tokensieve.drawing.stages import ANCHOR, DROPPED, FOLDED, GONE, MIXED, PICKED, Stage

# Colours that are distinct with every common kind of colour blindness (Okabe and Ito), and such a colour map (viridis).
STYLE: dict[str, str] = {"anchor": "#D55E00", "picked": "#0072B2", "paper": "#FFFFFF", "ink": "#1A1A1A", "soft": "#6B6B6B"}
STYLE |= {"mixed": "#009E73", "folded": "#CC79A7"}
TINTS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#332288", "#A6761D", "#882255")
HEAT = "viridis"
MAX_SIDE = 1400  # pixels; larger images are scaled down before they are drawn


def draw_original(axis: Any, band: Band) -> None:
    """The image with the grid of its patches; areas outside the model's input are hatched."""
    _place(axis, band)
    _show(axis, band, _pixels(band.image))
    if band.grid is not None:
        _outline(axis, band.patches, "#FFFFFF", 0.4, alpha=0.55)
    _veil(axis, band)


def draw_kept(axis: Any, band: Band, stage: Stage) -> None:
    """Anchors and picked patches in full, the others faded; patches that are merged into one token in one colour."""
    _place(axis, band)
    patches, states, joint = band.patches, stage.states, stage.joint
    pixels = _pixels(band.image)
    grey = pixels.mean(axis=2, keepdims=True).repeat(3, axis=2)
    _show(axis, band, 0.22 * grey + 0.78 * 0.86)
    _fill(axis, patches[states == GONE], "#8C8C8C", 0.75)
    _fill(axis, patches[states == FOLDED], STYLE["folded"], 0.3)
    kept = patches[states == MIXED] if stage.shares is not None else patches[stage.groups >= 0]
    if len(kept):
        _show(axis, band, pixels).set_clip_path(_path(kept), axis.transData)
    if joint.any():
        colours = tints(stage.groups, joint, band.grid) if stage.colours is None else stage.colours
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
    """The share of each patch in the mean of all tokens, in percent, as a heat map."""
    assert stage.shares is not None
    draw_heat(axis, bar, band, np.where(stage.states == GONE, np.nan, 100 * stage.shares))


def draw_heat(axis: Any, bar: Any, band: Band, values: np.ndarray) -> None:
    """Values (N,) of the patches, NaN for none, in colour over the grey image."""
    assert band.grid is not None
    _place(axis, band)
    _show(axis, band, _pixels(band.image).mean(axis=2, keepdims=True).repeat(3, axis=2))
    finite = np.isfinite(values)
    low, high = float(np.min(values[finite])), float(np.max(values[finite]))
    heat = PolyCollection(_corners(band.patches[finite]), array=values[finite], cmap=HEAT, alpha=0.72)
    heat.set_clim(low, high if high > low else low + 1e-6)
    axis.add_collection(heat)
    _fill(axis, band.patches[~finite], "#E6E6E6", 0.85)
    _veil(axis, band)
    axis.figure.colorbar(heat, cax=bar, orientation="horizontal", ticks=[low, high] if high > low else [low])
    bar.set_xticklabels([f"{value:.3g}" for value in ([low, high] if high > low else [low])], fontsize=7, color=STYLE["soft"])
    bar.tick_params(length=0, pad=2)
    bar.xaxis.get_ticklabels()[0].set_horizontalalignment("left")
    bar.xaxis.get_ticklabels()[-1].set_horizontalalignment("right")
    bar.set_frame_on(False)


def _pixels(image: Image.Image) -> np.ndarray:
    """(h, w, 3) from 0 to 1, scaled down to MAX_SIDE."""
    longest = max(image.size)
    if longest > MAX_SIDE:
        image = image.resize([max(1, round(side * MAX_SIDE / longest)) for side in image.size], Image.Resampling.LANCZOS)
    return np.asarray(image, dtype=np.float32) / 255


def axis_limits(one: Band) -> tuple[float, float, float, float]:
    """left, right, bottom, top of what is drawn: the image, and the padding of the model's input."""
    (wide, high), f = one.image.size, one.frame
    x, y = sorted((f.left, f.right)), sorted((f.top, f.bottom))
    slack = 0.01 * max(wide, high)
    left, right = (x[0] if x[0] < -slack else 0), (x[1] if x[1] > wide + slack else wide)
    top, bottom = (y[0] if y[0] < -slack else 0), (y[1] if y[1] > high + slack else high)
    return left, right, bottom, top


def _place(axis: Any, one: Band) -> None:
    left, right, bottom, top = axis_limits(one)
    axis.set(xlim=(left, right), ylim=(bottom, top), aspect="equal", anchor="NW", xticks=[], yticks=[])
    axis.set_facecolor("#F2F2F2")
    for side in axis.spines.values():
        side.set(color="#C8C8C8", linewidth=0.6)


def _show(axis: Any, one: Band, pixels: np.ndarray) -> Any:
    limits = axis.get_xlim(), axis.get_ylim()
    wide, high = one.image.size
    artist = axis.imshow(pixels.clip(0, 1), extent=(0, wide, high, 0), aspect="equal", interpolation="antialiased")
    axis.set(xlim=limits[0], ylim=limits[1])
    return artist


def _corners(patches: np.ndarray) -> Any:
    """(M, 4) -> (M, 4, 2), the corners in order."""
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


def tints(groups: np.ndarray, joint: np.ndarray, grid: tuple[int, ...] | None) -> np.ndarray:
    """(N,) a colour for each patch: groups that touch, even at a corner, get different ones as long as there are enough.

    grid: (h, w), or (frames, h, w): groups touch those of the next frame too.
    """
    assert grid is not None
    *frames, high, wide = grid
    group = np.where(joint, groups, -1).reshape(*(frames or [1]), high, wide)
    touching: dict[int, set[int]] = {int(g): set() for g in np.unique(group) if g >= 0}
    for later, down, right in ((0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 1, -1), (1, 0, 0)):
        a = group[: len(group) - later, : high - down, max(0, -right) : wide - max(0, right)]
        b = group[later:, down:, max(0, right) : wide + min(0, right)]
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
    """(L, 2) pairs of patches to join by lines, so that groups of the same colour can be distinguished.

    Each piece of a group that does not touch the patch that represents it is joined to that patch.
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


def unseen_area(one: Band) -> list[tuple[float, float, float, float]]:
    """The parts of the image that the patches do not cover: (left, top, right, bottom)."""
    wide, high = one.image.size
    x, y = sorted((one.frame.left, one.frame.right)), sorted((one.frame.top, one.frame.bottom))
    if one.grid is not None:
        x, y = [one.patches[:, 0].min(), one.patches[:, 2].max()], [one.patches[:, 1].min(), one.patches[:, 3].max()]
    strips = [(0, 0, x[0], high), (x[1], 0, wide, high), (x[0], 0, x[1], y[0]), (x[0], y[1], x[1], high)]
    return [s for s in strips if s[2] - s[0] > 0.008 * wide and s[3] - s[1] > 0.008 * high]


def _veil(axis: Any, one: Band) -> None:
    for left, top, right, bottom in unseen_area(one):
        box = (left, top), right - left, bottom - top
        axis.add_patch(Rectangle(*box, facecolor=to_rgba("#F2F2F2", 0.72), edgecolor="#9A9A9A", hatch="/////", linewidth=0))


# ------------------------------------------------------------------------------------------------------------- declarations


def _kept_entries(bands: Sequence[Band]) -> list[Any]:
    """A sample with its label for every kind of mark in these bands."""
    stages = [stage for band in bands for stage in band.stages]
    states = {int(state) for stage in stages for state in np.unique(stage.states)}
    entries: list[Any] = []
    if ANCHOR in states:
        entries.append(Patch(facecolor="none", edgecolor=STYLE["anchor"], linewidth=2, label="anchor"))
    if any(((stage.states == PICKED) & ~stage.joint).any() for stage in stages):
        entries.append(Patch(facecolor="none", edgecolor=STYLE["picked"], linewidth=1.2, label="kept"))
    if MIXED in states:
        entries.append(Patch(facecolor="none", edgecolor=STYLE["mixed"], linewidth=1.2, label="selected and mixed"))
    if FOLDED in states:
        entries.append(Patch(facecolor=to_rgba(STYLE["folded"], 0.3), label="folded into one"))
    if any(stage.joint.any() for stage in stages):
        entries.append(Patch(facecolor=TINTS[1], edgecolor="#FFFFFF", label="one colour: one token"))
        dot: dict[str, Any] = {"marker": "o", "markersize": 4, "markeredgecolor": "#FFFFFF", "linestyle": "none"}
        entries.append(Line2D([], [], color=STYLE["ink"], label="stands for its group", **dot))
    if DROPPED in states:
        zeroed = all(band.zeroed for band in bands if band.stages)
        entries.append(Patch(facecolor="#D9D9D9", label="set to 0" if zeroed else "dropped"))
    if GONE in states:
        entries.append(Patch(facecolor="#8C8C8C", label="dropped at an earlier cut"))
    return entries


def _original_entries(bands: Sequence[Band]) -> list[Any]:
    if not any(unseen_area(band) for band in bands):
        return []
    return [Patch(facecolor="#F2F2F2", edgecolor="#9A9A9A", hatch="/////", label="not seen by the model")]


KEPT = PANELS.add(
    PanelKind(
        "kept",
        draw_kept,
        applies=lambda stage: True,
        caption="{stage.tokens_in} → {stage.tokens_out}",
        in_brief=True,
        legend=_kept_entries,
    ),
    origin=__name__,
)
SCORES = PANELS.add(
    PanelKind(
        "scores",
        draw_scores,
        applies=lambda stage: stage.scores is not None,
        caption="scores",
        heading="scores",
        remark="by which patches were chosen",
        has_color_bar=True,
    ),
    origin=__name__,
)
SHARES = PANELS.add(
    PanelKind(
        "shares",
        draw_shares,
        applies=lambda stage: stage.shares is not None,
        caption="weights, %",
        heading="weights",
        remark="of the patches in the mean token, %",
        has_color_bar=True,
    ),
    origin=__name__,
)
ORIGINAL = PANELS.add(PanelKind("original", draw_original, legend=_original_entries), origin=__name__)


def kinds_of(stage: Stage, brief: bool = False) -> list[PanelKind]:
    """The kinds of panels that a cut has. brief: only the most important ones, which otherwise come first."""
    kinds = [kind for kind in PANELS.values() if kind.applies is not None and kind.applies(stage)]
    return [kind for kind in kinds if kind.in_brief] + [kind for kind in kinds if not kind.in_brief and not brief]
