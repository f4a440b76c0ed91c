"""Images and videos of a Qwen-VL: flat patches of any number; each square of patches becomes one token of the decoder.

Made smaller, an image has fewer tokens than its prompt has placeholders. Its tokens take the last of them, so that what follows
the image follows its last token; those of a video take the last of each frame, since text may stand between frames. Positions
(mRoPE) are those of a prompt without the other placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokensieve.errors import UserError
from tokensieve.models.image_grid import IMAGE, VIDEO, name_arguments
from tokensieve.models.resizing import SizeRule, resize_images

MIN_TOKENS = 4  # of an image, by the default min_pixels of Qwen2-VL's processor


PIXELS = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}  # arguments, by medium


class Placed(NamedTuple):
    """Where the tokens of each image are among its placeholders."""

    lengths: list[int]  # placeholders of each image or video
    kept: list[Tensor]  # for each image: those that hold its tokens, (K,)
    note: str = ""  # about images that are very small


@dataclass(frozen=True)
class QwenImages:
    """How a model takes images, and how they are made smaller."""

    inner: Any  # the model with get_image_features and get_rope_index
    patch: int
    merge: int  # side of the square of patches that becomes one token
    frames: int  # images that one patch spans; one image is repeated so many times

    def resize(self, medium: str, decide: SizeRule, named: Mapping[str, Any]) -> tuple[dict[str, Any], Placed]:
        """The arguments of get_image_features or get_video_features with smaller images, and where their tokens go."""
        grid_name, pixel_name = f"{medium}_grid_thw", PIXELS[medium]
        made_before = [name for name in named if name.startswith(f"{medium}_") and name != grid_name]
        if made_before:
            raise UserError(f"{made_before[0]} was computed for {medium}s before they are resized; leave it out")
        grids, pixels = named[grid_name], named[pixel_name]
        if int(grids.prod(1).sum()) != len(pixels):
            raise UserError(f"{grid_name} has {int(grids.prod(1).sum())} patches, {pixel_name} {len(pixels)}")
        smaller = self._shrink(grids, decide)
        made = {grid_name: smaller, pixel_name: self._resize_pixels(pixels, grids, decide)}
        return {**named, **made}, self._place(grids, smaller)

    def rope_index(
        self, stock: Callable[..., Any], decide: SizeRule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """get_rope_index for smaller images: positions (3, B, L), and what is added to later positions, (B, 1).

        Placeholders that hold no token are masked like padding, which the stock function leaves out.
        """
        named = name_arguments(self.inner.get_rope_index, args, kwargs)
        ids, mask = named["input_ids"], named.get("attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device, torch.bool).clone()
        empty = torch.zeros_like(ids, dtype=torch.bool)  # (B, L), placeholders that hold no token
        for medium in PIXELS:
            grids, is_token = named.get(f"{medium}_grid_thw"), ids == getattr(self.inner.config, f"{medium}_token_id")
            if grids is None or not is_token.any():
                continue
            smaller = self._shrink(grids, decide)
            placed = self._place(grids, smaller)
            if int(is_token.sum()) != sum(placed.lengths):
                raise UserError(f"{int(is_token.sum())} placeholders, but the {medium}s have {sum(placed.lengths)} tokens")
            holds = [torch.zeros(n, dtype=torch.bool).index_fill(0, at, True) for n, at in zip(*placed[:2], strict=True)]
            empty[is_token] = ~torch.cat(holds).to(ids.device)
            named[f"{medium}_grid_thw"] = smaller
        if not empty.any():
            out: tuple[Tensor, Tensor] = stock(**named)
            return out
        positions, deltas = stock(**named | {"attention_mask": (real & ~empty).to(torch.long)})
        return positions, deltas - empty.sum(1, keepdim=True)

    def _shrink(self, grids: Tensor, decide: SizeRule) -> Tensor:
        """The grids (I, 3) of smaller images, in whole tokens."""
        unit = self.patch * self.merge
        sizes = [decide((h * self.patch, w * self.patch), (unit, unit)).size for _, h, w in grids.tolist()]
        made = [(t, h // self.patch, w // self.patch) for t, (h, w) in zip(grids[:, 0].tolist(), sizes, strict=True)]
        return torch.tensor(made, dtype=grids.dtype, device=grids.device)

    def _place(self, grids: Tensor, smaller: Tensor) -> Placed:
        lengths, left = ((grid.prod(1) // self.merge**2).tolist() for grid in (grids, smaller))
        kept = []
        for (frames, _, _), n, k in zip(grids.tolist(), lengths, left, strict=True):
            of_frame = torch.arange(n).view(frames, -1)  # (t, n / t)
            kept.append(of_frame[:, (n - k) // frames :].flatten())
        note = f"an image has fewer than the {MIN_TOKENS} tokens that Qwen's processor gives it at least (min_pixels)"
        return Placed(lengths, kept, note if min(left) < MIN_TOKENS else "")

    def _resize_pixels(self, pixels: Tensor, grids: Tensor, decide: SizeRule) -> Tensor:
        """Flat patches of all images, (sum of t * h * w, 3 * frames * patch * patch) -> those of smaller images."""
        unit, made = self.patch * self.merge, []
        for flat, (t, h, w) in zip(pixels.split(grids.prod(1).tolist()), grids.tolist(), strict=True):
            to = decide((h * self.patch, w * self.patch), (unit, unit))
            made.append(self._to_patches(resize_images(self._to_images(flat, t, h, w), to), t))
        return torch.cat(made)

    def _to_images(self, patches: Tensor, t: int, h: int, w: int) -> Tensor:
        """(t * h * w, 3 * frames * patch * patch) -> (t * frames, 3, H, W)."""
        m, p, f = self.merge, self.patch, self.frames
        cells = patches.reshape(t, h // m, w // m, m, m, -1, f, p, p).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
        return cells.reshape(t * f, -1, h * p, w * p)  # from (t, f, 3, h/m, m, p, w/m, m, p)

    def _to_patches(self, images: Tensor, t: int) -> Tensor:
        """(t * frames, 3, H, W) -> (t * h * w, 3 * frames * patch * patch): _to_images undone."""
        m, p, f = self.merge, self.patch, self.frames
        channels, h, w = images.shape[1], images.shape[2] // p, images.shape[3] // p
        cells = images.reshape(t, f, channels, h // m, m, p, w // m, m, p).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return cells.reshape(t * h * w, -1)


def open_images(inner: Any) -> QwenImages:
    """How a Qwen-VL takes images, by its config."""
    vision = inner.config.vision_config
    return QwenImages(inner, int(vision.patch_size), int(vision.spatial_merge_size), int(vision.temporal_patch_size))
