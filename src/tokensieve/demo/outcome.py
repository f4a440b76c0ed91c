"""What a plan did to an image, as JSON for the page."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tokensieve.drawing.band import Band
from tokensieve.drawing.panels import HEAT, STYLE, TINTS, axis_limits, tints, unseen_area
from tokensieve.drawing.sheet import where
from tokensieve.drawing.stages import Stage

DIGITS = 5  # of scores
SHADES = 32  # of the colour map


def describe_band(band: Band) -> dict[str, Any]:
    """One image under a plan: where its patches are, and every cut."""
    described: dict[str, Any] = {
        "size": list(band.image.size),
        "limits": list(axis_limits(band)),
        "tokens": band.tokens,
        "notes": band.notes,
        "zeroed": band.zeroed,
        "grid": None,
        "stages": [],
    }
    if band.grid is not None:
        h, w = band.grid
        patches = band.patches.reshape(h, w, 4)  # left, top, right, bottom
        described |= {
            "grid": [h, w],
            "columns": [round(float(x), 2) for x in [*patches[0, :, 0], patches[0, -1, 2]]],
            "rows": [round(float(y), 2) for y in [*patches[:, 0, 1], patches[-1, 0, 3]]],
            "unseen": [[round(float(side), 2) for side in area] for area in unseen_area(band)],
            "stages": [describe_stage(stage, band.grid) for stage in band.stages],
        }
    return described


def describe_stage(stage: Stage, grid: tuple[int, int]) -> dict[str, Any]:
    """One cut. tints: the number of each patch's colour in TINTS, -1 for those that are not merged."""
    colours = tints(stage.groups, stage.joint, grid)
    return {
        "layer": stage.layer,
        "where": where(stage.layer),
        "tokens_in": stage.tokens_in,
        "tokens_out": stage.tokens_out,
        "states": stage.states.tolist(),
        "groups": stage.groups.tolist(),
        "tints": [TINTS.index(colour) if colour else -1 for colour in colours],
        "scores": None if stage.scores is None else _numbers(stage.scores),
        "shares": None if stage.shares is None else _numbers(100 * stage.shares),
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]


def colours() -> dict[str, Any]:
    """The colours of `show`, so that the page draws with the same."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    heat = colormaps[HEAT]
    return {"style": STYLE, "tints": TINTS, "heat": [to_hex(heat(number / (SHADES - 1))) for number in range(SHADES)]}
