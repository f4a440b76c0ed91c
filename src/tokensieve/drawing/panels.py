"""TODO docstring."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from matplotlib.path import Path as Outline
from PIL import Image

from tokensieve.drawing.band import Band
from tokensieve.drawing.stages import ANCHOR, FOLDED, GONE, MIXED, PICKED, Stage

# Colours that differ for every common kind of colour blindness (Okabe and Ito's), and a map that does (viridis).
STYLE: dict[str, str] = {"anchor": "#D55E00", "picked": "#0072B2", "paper": "#FFFFFF", "ink": "#1A1A1A", "soft": "#6B6B6B"}
STYLE |= {"mixed": "#009E73", "folded": "#CC79A7"}
TINTS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#332288", "#A6761D", "#882255")
HEAT = "viridis"
SHARPEST = 1400  # pixels on a side beyond which no picture gets sharper


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


def _pixels(image: Image.Image) -> np.ndarray:
    """(h, w, 3) from 0 to 1, no larger than can be seen."""
    longest = max(image.size)
    if longest > SHARPEST:
        image = image.resize([max(1, round(side * SHARPEST / longest)) for side in image.size], Image.Resampling.LANCZOS)
    return np.asarray(image, dtype=np.float32) / 255


def axis_limits(one: Band) -> tuple[float, float, float, float]:
    """left, right, bottom, top of what is shown: the image, and padding where the model saw some."""
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
