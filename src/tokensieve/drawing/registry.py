"""Declarations of what `tokensieve show` takes and draws: kinds of input, and kinds of panels. This module imports no torch.

Kinds of panels are declared beside their drawing (panels.py), kinds of input here or in the package that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokensieve.flags import Flag, integer_in
from tokensieve.registry import Registry

if TYPE_CHECKING:
    from tokensieve.drawing.band import Band
    from tokensieve.drawing.stages import Stage


def _no_entries(bands: Sequence[Band]) -> list[Any]:
    return []


@dataclass(frozen=True)
class PanelKind:
    """One way to draw an image: as it is, or what one cut of a plan did to it."""

    name: str
    draw: Callable[..., None]  # (axes, band, stage), with a colour bar (axes, axes of the bar, band, stage)
    applies: Callable[[Stage], bool] | None = None  # which cuts get such a panel; None: it draws the image, not a cut
    caption: str = ""  # above the panel, formatted with `stage`
    heading: str = ""  # above a block of such panels, one for each image of an object
    remark: str = ""  # below the heading
    has_color_bar: bool = False
    in_brief: bool = False  # also drawn where there is room for one panel of each plan; such panels come first
    legend: Callable[[Sequence[Band]], list[Any]] = _no_entries  # legend entries, as matplotlib artists, of these bands


@dataclass(frozen=True)
class ShowInput:
    """A kind of input of `show`. The functions are named as "module:function" and imported when used."""

    name: str
    summary: str  # of the arguments, for the help
    accepts: str  # (args) -> bool: whether the arguments are of this kind
    run: str  # (args) -> the files that were written
    datasets: str | None = None  # "module:attribute", names of the data sets whose samples are shown as NAME:N
    flags: tuple[Flag, ...] = ()  # those that only this kind has


PANELS: Registry[PanelKind] = Registry("kind of panel")
SHOW_INPUTS: Registry[ShowInput] = Registry("kind of input")

# The last declaration that accepts the arguments wins: plug-ins, then videos, then questions, then image files, which
# accept everything.
SHOW_INPUTS.add(
    ShowInput(
        "images",
        "image files, embedded:N for a scene of the embedded test set, or your own data (folder:DIR, images:DIR, csv:FILE; "
        "with :N one image of it)",
        accepts="tokensieve.drawing.show_images:accepts",
        run="tokensieve.drawing.show_images:run",
        datasets="tokensieve.drawing.show_images:DATASETS",
    ),
    origin=__name__,
)
SHOW_INPUTS.add(
    ShowInput(
        "questions",
        "with --question or a vision-language model also its answers",
        accepts="tokensieve.drawing.show_questions:accepts",
        run="tokensieve.drawing.show_questions:run",
        flags=(Flag("question", "ask a vision-language model this, and show its answers", options={"metavar": "TEXT"}),),
    ),
    origin=__name__,
)
SHOW_INPUTS.add(
    ShowInput(
        "videos",
        "a video file or embedded-clips:N, as frames and as a moving picture (GIF)",
        accepts="tokensieve.drawing.show_videos:accepts",
        run="tokensieve.drawing.show_videos:run",
        datasets="tokensieve.drawing.show_videos:DATASETS",
        flags=(Flag("frames", "of a video (default: 8)", options={"type": integer_in(1, 64), "metavar": "N"}),),
    ),
    origin=__name__,
)
