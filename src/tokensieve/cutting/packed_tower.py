"""Cuts in a tower whose batch is one sequence of patches (Qwen-VL): whole squares of patches leave it.

A method sees the squares of one image as its tokens, each the mean of its patches. The blocks behind a cut are the stock ones:
they run on the patches that are left, with their rotary angles, and with the ends of images and windows moved together. What
the mergers make of the squares goes back to their places, with zeros for the others, which are dropped before the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.core import Question
from tokensieve.cutting.choice import Chooser
from tokensieve.cutting.passes import Calls
from tokensieve.cutting.placement import Cut
from tokensieve.cutting.projected import TileTokens, cut_tiles, fill_tiles, open_tiles
from tokensieve.errors import UserError
from tokensieve.models import patching
from tokensieve.models.image_grid import ImageTokens
from tokensieve.models.packed_tower import PackedTower, select_inputs
from tokensieve.models.tower import Undo


@dataclass
class Squares:
    """The squares of patches that are left of the images of one pass of the tower."""

    layouts: Sequence[ImageTokens]
    first: int  # the number of the first image among all of the pass
    question: Callable[[], Question | None]
    prompts: Callable[[], list[int]]
    order: Tensor | None = None  # (S,), the raster number of the square at each place of the sequence; None: its place
    at: Tensor | None = None  # (K,), places that are left, ascending; None: all
    tiles: list[TileTokens] | None = None  # what is left of each image; None: no cut has run

    @property
    def total(self) -> int:
        """Squares of all images before any cut."""
        return sum(layout.total for layout in self.layouts)

    def of_images(self, rows: Tensor) -> list[Tensor]:
        """Rows for the squares in the sequence, (K, W), as those of each image in raster order, (N, W); 0 for missing ones."""
        if self.order is not None or self.at is not None:
            places = torch.arange(self.total, device=rows.device) if self.at is None else self.at.to(rows.device)
            numbers = places if self.order is None else self.order.to(rows.device)[places]
            rows = rows.new_zeros((self.total, rows.shape[1])).index_copy(0, numbers, rows)
        return list(rows.split([layout.total for layout in self.layouts]))

    def keep(self, tiles: list[TileTokens]) -> Tensor:
        """Keeps these squares alone, the last of whose streams are the rows of the sequence; these in its order, (K, W)."""
        starts = [0]
        for layout in self.layouts:
            starts.append(starts[-1] + layout.total)
        places = torch.cat([starts[tile.image] + tile.at for tile in tiles])  # (K,)
        if self.order is not None:
            places = self.order.to(places.device).argsort()[places]
        places, order = places.sort()
        self.at, self.tiles = places if len(places) < self.total else None, tiles
        return torch.cat([tile.streams[-1] for tile in tiles])[order]

    def spread(self, tokens: Tensor) -> Tensor:
        """What a merger made of the squares that are left (K, E), at their places among all: (S, E), zeros at the others."""
        if self.at is None:
            return tokens
        return tokens.new_zeros((self.total, tokens.shape[1])).index_copy(0, self.at.to(tokens.device), tokens)

    def inputs_of(self, given: Mapping[str, Any], unit: int) -> Mapping[str, Any]:
        """What a block is handed besides the tokens, for the squares of `unit` patches that are left."""
        if self.at is None:
            return given
        patches = self.at[:, None] * unit + torch.arange(unit, device=self.at.device)  # (K, unit)
        return select_inputs(patches.flatten(), given)

    def left(self) -> list[TileTokens]:
        """The squares that are left of each image, behind the tower."""
        if self.tiles is None:
            raise UserError("the tower ran without the plan: remove() the plan and apply it again")
        return self.tiles


class PackedCuts:
    """The cuts of a plan in one tower."""

    def __init__(self, tower: PackedTower, cuts: Sequence[Cut], chooser: Chooser, calls: Calls) -> None:
        self.tower, self.cuts, self.chooser, self.calls = tower, cuts, chooser, calls

    def attach(self, undo: list[Undo]) -> None:
        """Attaches the cuts, and adds the functions that remove them, in reverse order."""
        self.tower.check()
        first = min(cut.layer for cut in self.cuts)
        undo += self.tower.watch_order(self._set_order)
        for number, block in enumerate(self.tower.blocks, start=1):
            if number >= first:
                undo.append(self._replace_block(block, number))
        undo += [patching.replace(merger, "forward", self._merge) for merger in self.tower.mergers]

    def _set_order(self, order: Tensor) -> None:
        if (squares := self.calls.current.squares) is not None:
            squares.order = order

    def _squares(self) -> Squares:
        squares = self.calls.current.squares
        if squares is None:
            raise UserError("the tower was called by itself, but its plan is that of the whole model; call get_image_features")
        return squares

    def _replace_block(self, block: nn.Module, number: int) -> Undo:
        """Has a block run on the squares that are left, and the cuts that stand before or behind it."""
        before = [cut for cut in self.cuts if cut.layer == 0 and number == 1]
        behind = [cut for cut in self.cuts if cut.layer == number]

        def forward(stock: Callable[..., Tensor], x: Tensor, **inputs: Any) -> Tensor:
            squares = self._squares()
            for cut in before:
                x = self._cut(cut, x, squares)
            x = stock(x, **squares.inputs_of(inputs, self.tower.unit))
            for cut in behind:
                x = self._cut(cut, x, squares)
            return x

        return patching.replace(block, "forward", forward)

    def _merge(self, stock: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return self._squares().spread(stock(x))

    def _cut(self, cut: Cut, x: Tensor, squares: Squares) -> Tensor:
        """Applies the step's method to the squares of each image: the patches that are left, (P, D)."""
        self.tower.check()
        with self.chooser.plan_work():
            patches = x.unflatten(0, (-1, self.tower.unit))  # (K, unit, D)
            streams = [squares.of_images(rows) for rows in (patches.mean(1), patches.flatten(1))]
            tiles = fill_tiles(squares.tiles or open_tiles(squares.layouts, x.device), streams)
            call = self.calls.current
            tiles = cut_tiles([cut], self.chooser, call, squares.first, tiles, squares.question, squares.prompts)
            if any(tile.sizes is not None for tile in tiles):
                raise UserError(f"{cut.step}: in training its gate changes sizes, which this tower does not take; use @out")
            return squares.keep(tiles).view(-1, x.shape[1])
