"""Cuts at @out behind the projector of a vision-language model: image by image, tile by tile. (`packed_tower.py` does the same
inside of a tower.)

The projector (or patch merger) hands over the tokens of each image. A method sees those of one tile, as a grid. The budget of
an image is shared by its tiles in proportion to their tokens. Tokens that belong to no tile, such as line ends, stay. What the
model adds to the same tokens in later layers (deep features) follows the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokensieve.core import Question, Reduction, View, frame_numbers
from tokensieve.cutting.allotment import allot, image_budgets
from tokensieve.cutting.choice import Chooser
from tokensieve.cutting.passes import BETWEEN_TILES, Call, Pass, TileCounts, row_of_images
from tokensieve.cutting.placement import Cut
from tokensieve.errors import UserError
from tokensieve.models.image_grid import ImageTokens


@dataclass
class TileTokens:
    """The tokens of one tile that are left."""

    image: int
    number: int  # of the tile in its image
    grid: tuple[int, ...] | None  # while no token is missing
    first: int  # tokens before any cut
    at: Tensor  # (K,), their placeholders among those of the image
    streams: list[Tensor]  # (K, E) each: the tokens, and their deep features
    frames: Tensor | None = None  # (K,), of a video: the frame of each token
    sizes: Tensor | None = None  # (K,); None: one each


@dataclass
class Projected:
    """The tokens of all tiles that are left, image by image."""

    streams: list[list[Tensor]]  # the features, and the deep features of each layer: (K, E) of each image
    kept: list[Tensor]  # (K,) of each image, their placeholders
    sizes: list[Tensor] | None  # (K,) of each image; None: one each
    frames: list[Tensor] | None  # (K,) of each video, the frame of each token; None: they are images


@dataclass(frozen=True)
class _Chosen:
    """What a cut did to one tile."""

    reduction: Reduction
    row: int  # of the tile in the reduction
    k: int  # tokens that are left


def open_tiles(layouts: Sequence[ImageTokens], device: torch.device) -> list[TileTokens]:
    """All tiles of images or videos, without their tokens."""
    tiles = []
    for image, layout in enumerate(layouts):
        for number, tile in enumerate(layout.tiles):
            frames = None if tile.grid is None else frame_numbers(tile.grid, 1, device)
            tiles.append(TileTokens(image, number, tile.grid, len(tile.at), tile.at.to(device), []))
            tiles[-1].frames = None if frames is None else frames[0]
    return tiles


def fill_tiles(
    tiles: Sequence[TileTokens], streams: Sequence[Sequence[Tensor]], sizes: Sequence[Tensor] | None = None
) -> list[TileTokens]:
    """The tiles with their tokens.

    streams: the features, and the deep features of each layer: (N, E) of each image. sizes: (N,) of each image; None: one each.
    """
    filled = []
    for tile in tiles:
        at, of_image = tile.at, [stream[tile.image] for stream in streams]
        is_whole = len(at) == len(of_image[0]) and bool((at.diff() == 1).all())
        own = of_image if is_whole else [stream[at] for stream in of_image]
        filled.append(replace(tile, streams=own, sizes=None if sizes is None else sizes[tile.image][at]))
    return filled


def cut_tiles(
    cuts: Sequence[Cut],
    chooser: Chooser,
    call: Call,
    first: int,
    tiles: list[TileTokens],
    question: Callable[[], Question | None],
    prompts: Callable[[], list[int]],
) -> list[TileTokens]:
    """Applies the cuts to the tiles of all images, or of all videos.

    first: the number of the first of them among all of the pass. question, prompts: of each image, its question and the
    number of its prompt.
    """
    for cut in cuts:
        tiles = _ProjectedCut(cut, chooser, call, first).run(tiles, question, prompts)
    return tiles


@dataclass(frozen=True)
class _ProjectedCut:
    """A cut in one call."""

    cut: Cut
    chooser: Chooser
    call: Call
    first: int  # the number of the first image among all of the pass

    def run(
        self, tiles: list[TileTokens], question: Callable[[], Question | None], prompts: Callable[[], list[int]]
    ) -> list[TileTokens]:
        """The tiles behind the cut."""
        cut = self.cut
        text = question() if {"question", "text"} & set(cut.step.method.needs) else None
        cuts = _share(cut, self.chooser, tiles, prompts)
        alike: dict[tuple[int, tuple[object, ...]], list[int]] = {}  # tiles that pass through the method together
        for i, (tile, own) in enumerate(zip(tiles, cuts, strict=True)):
            keep = self.chooser.tokens_to_keep(own, len(tile.at), tile.first)
            if keep < len(tile.at) or cut.step.method.adaptive:
                alike.setdefault((keep, (len(tile.at), tile.first, tile.grid, tile.sizes is None)), []).append(i)
        left, chosen = list(tiles), [_everything(tile) for tile in tiles]
        for (keep, _), numbers in alike.items():
            members = [tiles[i] for i in numbers]
            streams = [_stack(each) for each in zip(*(tile.streams for tile in members), strict=True)]  # (G, N, E) each
            sizes = _stack_known([tile.sizes for tile in members])
            reduction = self._decide(cuts[numbers[0]], keep, members, streams[0], sizes, text)
            streams, sizes = [reduction.apply(stream) for stream in streams], reduction.sizes_after(sizes)
            counts = [reduction.k] * len(members)
            if reduction.counts is not None:
                counts, real = reduction.counts.tolist(), reduction.is_real()
                if sizes is not None and bool((sizes[real] == 1).all()):  # they only told the padding
                    sizes = None
            for row, (i, k) in enumerate(zip(numbers, counts, strict=True)):
                chosen[i] = _Chosen(reduction, row, k)
                left[i] = replace(
                    tiles[i],
                    grid=None,
                    at=tiles[i].at[reduction.index[row, :k]],
                    streams=[stream[row, :k] for stream in streams],
                    frames=_select(tiles[i].frames, reduction.index[row, :k]),
                    sizes=None if sizes is None else sizes[row, :k],
                )
        assert self.call.tower is not None
        _record(cut, tiles, chosen, self.call.tower)
        return left

    def _decide(
        self,
        cut: Cut,
        keep: int,
        tiles: Sequence[TileTokens],
        tokens: Tensor,
        sizes: Tensor | None,
        text: Question | None,
    ) -> Reduction:
        """The decision of the step about tiles with the same number of tokens (G, N, E)."""
        state = self.call.tower
        assert state is not None
        images = torch.tensor([tile.image for tile in tiles], device=tokens.device)
        numbers = torch.tensor([tile.number for tile in tiles], device=tokens.device)
        with torch.autocast(tokens.device.type, enabled=False):  # scores need full precision
            view = View(
                tokens=tokens,
                prefix=tokens[:, :0],
                grid=tiles[0].grid,
                sizes=sizes,
                samples=state.samples.to(tokens.device)[self.first + images] + numbers * BETWEEN_TILES,
                seed=cut.seed,
                context=self.call.context,
                part=self.chooser.part(cut.step, tokens.device),
                place=cut.name,
                question=None if text is None else text.rows(images),
                layer=cut.layer,
                frames=_stack_known([tile.frames for tile in tiles]),
                share=cut.share,
            )
            reduction = self.chooser.choose(cut, view, keep, (self.first + images).tolist())
        if reduction.soft is not None:
            raise UserError(f"{cut.step}: a soft mask works in a decoder only, at @llm.L")
        return reduction


def _share(cut: Cut, chooser: Chooser, tiles: Sequence[TileTokens], prompts: Callable[[], list[int]]) -> list[Cut]:
    """The cut of each tile, with its share of the budget of its image or prompt."""
    scope = cut.budget.scope
    images = [[tile for tile in tiles if tile.image == image] for image in range(tiles[-1].image + 1)]
    of_images = [[len(tile.at) for tile in own] for own in images]
    if scope == "tile" or (scope == "image" and len(tiles) == len(of_images)):
        return [cut] * len(tiles)
    firsts = [sum(tile.first for tile in own) for own in images]
    of_prompts = prompts() if scope == "prompt" else ()
    budgets = image_budgets(cut, chooser, [sum(counts) for counts in of_images], firsts, of_prompts)
    shares = [share for total, counts in zip(budgets, of_images, strict=True) for share in allot(total, counts)]
    return [cut.with_allotted(share) for share in shares]


def _stack(of_tiles: Sequence[Tensor]) -> Tensor:
    """(N, ...) of each tile as (G, N, ...); of a single tile without a copy."""
    return of_tiles[0][None] if len(of_tiles) == 1 else torch.stack(list(of_tiles))


def _stack_known(of_tiles: Sequence[Tensor | None]) -> Tensor | None:
    """What is known about the tokens of each tile (N,) as (G, N); None where nothing is."""
    known = [each for each in of_tiles if each is not None]
    return _stack(known) if known else None


def _select(known: Tensor | None, index: Tensor) -> Tensor | None:
    return None if known is None else known[index]


def _everything(tile: TileTokens) -> _Chosen:
    """A tile of which all is kept."""
    n = len(tile.at)
    return _Chosen(Reduction(torch.arange(n, device=tile.at.device)[None], n), 0, n)


def assemble(tiles: Sequence[TileTokens]) -> Projected:
    """The tokens of each image, those of several tiles in the order of their placeholders."""
    streams: list[list[Tensor]] = [[] for _ in tiles[0].streams]
    kept, sizes = [], []
    has_sizes = any(tile.sizes is not None for tile in tiles)
    for image in range(tiles[-1].image + 1):
        own = [tile for tile in tiles if tile.image == image]
        at = torch.cat([tile.at for tile in own])
        order = torch.arange(len(at), device=at.device) if len(own) == 1 else at.argsort()
        kept.append(at[order])
        for number, stream in enumerate(streams):
            stream.append(torch.cat([tile.streams[number] for tile in own])[order])
        if has_sizes:
            of_tiles = [torch.ones(len(tile.at), device=at.device) if tile.sizes is None else tile.sizes for tile in own]
            sizes.append(torch.cat(of_tiles)[order])
    frames = [tile.frames for tile in tiles if tile.frames is not None]  # a video is one tile
    return Projected(streams, kept, sizes if has_sizes else None, frames or None)


def _record(cut: Cut, tiles: Sequence[TileTokens], chosen: Sequence[_Chosen], state: Pass) -> None:
    """Adds the cut to the ledger and to the stages of the pass."""
    per_image: list[list[int]] = [[] for _ in range(tiles[-1].image + 1)]
    for i, tile in enumerate(tiles):
        per_image[tile.image].append(i)
    before = [[len(tiles[i].at) for i in numbers] for numbers in per_image]
    after = [[chosen[i].k for i in numbers] for numbers in per_image]
    at, images = state.projected_cuts.setdefault(cut.seed, (len(state.ledger), []))
    joins = bool(images)  # videos join the images of the same pass
    images += [TileCounts(*each) for each in zip(before, after, strict=True)]
    state.ledger[at : at + 1] = [row_of_images(cut.name, images)]
    if joins:
        state.is_uneven = True
    if joins or before == after:
        return
    is_one_choice = len(tiles) == len(per_image) == len(chosen[0].reduction.index)
    if is_one_choice and all(each.reduction is chosen[0].reduction for each in chosen):
        state.stages.append((cut.name, chosen[0].reduction))
        return
    state.is_uneven |= len(per_image) > 1
    first = per_image[0]
    state.stages.append((cut.name, _join([tiles[i] for i in first], [chosen[i] for i in first])))


def _join(tiles: Sequence[TileTokens], chosen: Sequence[_Chosen]) -> Reduction:
    """What a cut did to all tiles of an image, as one reduction of its tokens in the order of their placeholders."""
    at = torch.cat([tile.at for tile in tiles])
    ranks = at.argsort().argsort()  # (N,), the number of each token of the tiles among those of the image
    own = ranks.split([len(tile.at) for tile in tiles])
    heads = torch.cat([part[each.reduction.index[each.row, : each.k]] for part, each in zip(own, chosen, strict=True)])
    order = heads.argsort()  # of the output tokens
    joined = Reduction(heads[order][None], len(at))
    if all(each.reduction.is_selection for each in chosen):
        return joined
    outputs = order.argsort().split([each.k for each in chosen])  # the number of each output token
    weight = torch.zeros(len(heads), len(at), device=at.device)
    for part, out, each in zip(own, outputs, chosen, strict=True):
        weight[out[:, None], part] = each.reduction.as_weight()[each.row, : each.k]
    return replace(joined, weight=weight[None])
