"""One image under one plan: all that is needed to draw it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from tokensieve.cutting.passes import RESIZED, Row
from tokensieve.data.images import BrokenImage, open_photo
from tokensieve.drawing.geometry import Frame, find_frame
from tokensieve.drawing.stages import DROPPED, Stage, stages
from tokensieve.errors import UserError

if TYPE_CHECKING:
    from tokensieve.cutting.handle import Handle


@dataclass(frozen=True)
class Band:
    """One image under one plan, drawn as one row of panels."""

    image: Image.Image
    frame: Frame
    plan: str
    stages: list[Stage]
    grid: tuple[int, int] | None  # None: unknown, no grid is drawn
    name: str = ""  # of the image
    notes: list[str] = field(default_factory=list)
    zeroed: bool = False  # the last cut sets dropped tokens to 0
    resized: Row | None = None  # patches of the image before and after the plan made it smaller; None: it did not

    @property
    def patches(self) -> np.ndarray:
        """(N, 4) in pixels of the image."""
        assert self.grid is not None
        return self.frame.patches(self.grid)

    @property
    def tokens(self) -> str:
        before = "" if self.resized is None else f"{self.resized.tokens_in} → "
        if self.stages:
            return f"{before}{self.stages[0].tokens_in} → {self.stages[-1].tokens_out} patch tokens"
        if self.resized is not None:
            return f"{before}{self.resized.tokens_out} patch tokens"
        return f"all {self.grid[0] * self.grid[1]} patch tokens" if self.grid else "all patch tokens"


def make_band(
    handle: Handle,
    image: Image.Image,
    batch_index: int = 0,
    transform: Callable[[Any], Any] | None = None,
    *,
    frame: Frame | None = None,
    grid: tuple[int, int] | None = None,
    name: str = "",
) -> Band:
    """The band of one image of the handle's last batch. frame: where the image is in the input, if it is known already."""
    layout = handle.token_grid(batch_index)
    cuts, notes = stages(handle, batch_index), list(handle.notes)
    if layout is not None:
        frame, grid = Frame(0, 0, *image.size), (layout.rows, layout.columns)
        if layout.before and cuts:
            left = int((cuts[-1].states[: layout.before] > DROPPED).sum())
            notes.append(f"drawn: tiles; of the small whole image {left} of {layout.before} tokens are kept")
        cuts = [cut.of(layout.indices().numpy()) for cut in cuts]
    if frame is None:
        frame = find_frame(transform, image.size) if transform else Frame(0, 0, *image.size)
    if handle.plan.image_step is not None:
        frame = replace(frame, size=None)  # the tower resizes its input to whole patches
    return Band(
        image=image,
        frame=frame,
        plan=str(handle.plan),
        stages=cuts,
        grid=grid if layout is not None else handle.grid or grid,
        name=name,
        notes=notes,
        zeroed=any(step.rest == "zero" for step in handle.plan.steps),
        resized=next((row for row in handle.ledger if row.layer in RESIZED), None),
    )


def as_image(image: Any) -> Image.Image:
    """A file, a PIL image or a tensor (3, h, w) as a PIL image in RGB; a tensor is scaled to the full range."""
    if isinstance(image, (str, Path)):
        try:
            return open_photo(image)
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
