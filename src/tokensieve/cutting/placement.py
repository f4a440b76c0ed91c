"""The cuts of a plan in a given model: their positions, budgets and names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokensieve.core import Resize
from tokensieve.errors import Uncuttable, UserError
from tokensieve.methods.registry import NEEDS, Place
from tokensieve.models.packed_tower import PackedTower
from tokensieve.models.resizing import Size, SizeRule
from tokensieve.models.tower import Tower
from tokensieve.plan import Budget, Plan, Step


@dataclass(frozen=True)
class Cut:
    """A step at one position of a given model."""

    step: Step
    layer: int  # number of blocks before it; for part "attn" the block it is inside, for "llm" the decoder layer it precedes
    part: str  # "block", "attn", "out" or "llm"
    seed: int
    budget: Budget
    number: int = 0  # among the cuts of its step
    total: int = 1  # cuts of its step
    is_shared: bool = False  # rows of the tower's batch share its budget, and may be left with different numbers of tokens
    is_allotted: bool = False  # its budget is a part of what the step keeps of an image or a prompt

    def with_allotted(self, keep: int) -> Cut:
        """The cut with so many of the tokens that the step keeps of an image or a prompt."""
        return replace(self, budget=Budget("keep", Fraction(keep)), is_shared=False, is_allotted=True)

    @property
    def name(self) -> str:
        """The position in the ledger: "6", "6.attn", "out" or "llm.10"."""
        return position_name(self.layer, self.part)

    @property
    def share(self) -> Fraction | None:
        """The share of the arriving tokens that are kept, if the budget is one; None: it is a number of tokens."""
        return self.budget.amount if self.budget.kind == "share" else None

    def count(self, n: int, first: int | None = None) -> int:
        """The number of tokens kept of n: that of the budget or of the method's schedule, or the fewest that it can keep.

        first: tokens of the image before any cut; None: n.
        """
        wanted, least = self.wanted(n, first), self.step.method.min_keep
        return wanted if least is None else max(wanted, least(n))

    def wanted(self, n: int, first: int | None = None) -> int:
        """The number of tokens to keep of n, by the budget or by the method's schedule."""
        method, keep = self.step.method, self.budget.count(n)
        if method.count is None or self.is_allotted:
            return keep
        first = n if first is None else first
        place = Place(n, first, keep, self.budget.count(first), self.number, self.total, self.share)
        return min(n, method.count(place, self.step.options))

    def outputs(self, n: int, first: int | None = None) -> int:
        """The number of tokens behind the cut, of n; of an adaptive method the most that there can be."""
        keep = self.count(n, first)
        return keep if keep >= n else min(n, keep + self.step.method.n_extra(n, keep) + (self.step.rest == "fuse"))

    def acts(self, n: int, first: int | None = None) -> bool:
        """Whether the method may be asked: fewer than n tokens are to be kept, or it decides itself how many."""
        return self.is_shared or self.step.method.adaptive or self.count(n, first) < n


def position_name(layer: int, part: str) -> str:
    """The name of a position in the ledger and in `view.place`."""
    return {"block": f"{layer}", "attn": f"{layer}.attn", "out": "out", "llm": f"llm.{layer}"}[part]


@dataclass(frozen=True)
class ResizedTower:
    """A tower that sees smaller images."""

    tower: Tower  # its grid is that of the smaller images
    to: Resize
    full_grid: tuple[int, int]  # (h, w) of the patches of an image of the configured size
    decide: SizeRule  # for images of other sizes

    def positions(self, device: torch.device) -> Tensor:
        """Where the patches of a smaller image lie among those of a full one, as raster indices: (N,)."""
        (h, w), (full_h, full_w) = self.tower.grid, self.full_grid
        rows = (torch.arange(h, device=device) * full_h + full_h // 2) // h
        columns = (torch.arange(w, device=device) * full_w + full_w // 2) // w
        return (rows[:, None] * full_w + columns).flatten()


def resize_image(step: Step, image_size: Size, patch: Size) -> Resize:
    """The size that a step gives to one image; its own if that is not larger."""
    to: Resize = step.method.decide(image_size, patch, **step.arguments())
    return to if all(new <= old for new, old in zip(to.size, image_size, strict=True)) else replace(to, size=image_size)


def resize_tower(step: Step, tower: Tower) -> tuple[ResizedTower, list[str]]:
    """The tower with the images of a step that resizes them, and notes."""
    (height, width), (h, w) = tower.image_size, tower.grid
    patch = (height // h, width // w)
    # with padding, images may have other sizes than the configured one, and small ones stay as they are
    to: Resize = (
        resize_image(step, tower.image_size, patch)
        if tower.pads
        else step.method.decide(tower.image_size, patch, **step.arguments())
    )
    size = to.size
    if size[0] > height or size[1] > width:
        raise UserError(f"{step}: the model's images have {height} x {width} pixels; make them smaller")
    grid = (size[0] // patch[0], size[1] // patch[1])
    notes = []
    if grid == tower.grid:
        if not tower.pads:
            notes.append(f"{step}: images have this size already, so nothing is resized")
    elif step.options["size"] not in (0, min(size)):
        notes.append(f"{step}: rounded to {size[0]} x {size[1]} pixels, whole patches of {patch[0]} x {patch[1]}")
    return ResizedTower(replace(tower, grid=grid), to, tower.grid, partial(resize_image, step)), notes


def place_plan(
    plan: Plan,
    tower: Tower | None,
    seed: int,
    decoder: int | None = None,
    parts: Mapping[str, nn.Module] | None = None,
    out_is_projected: bool = False,
    has_tiles: bool = False,
    packed: PackedTower | None = None,
) -> list[Cut]:
    """The cuts of a plan in the order of execution: in the tower, then in the decoder.

    decoder: its number of layers. out_is_projected: @out is behind the projector. has_tiles: the tower sees tiles of images.
    packed: the tower, if its batch is one sequence of patches.
    """
    cuts: list[Cut] = []
    depth = tower.depth if tower is not None else packed.depth if packed is not None else 0
    for step in plan.token_steps:
        in_decoder = step.resolved_where(depth, decoder or 0).part == "llm"
        positions = (
            _resolve_decoder_positions(step, decoder, depth) if in_decoder else _resolve_positions(step, depth, decoder or 0)
        )
        for number, (layer, part) in enumerate(positions):
            if (layer, part) in positions[:number]:
                raise UserError(f"{step}: two of its places are layer {position_name(layer, part)} of this model; name it once")
            if part == "out" and out_is_projected:
                _check_projected(step, "-1" if tower is not None and tower.depth else "llm.2")
            elif part != "llm" and packed is not None:
                _check_packed(step, layer, part, packed)
            elif layer == 0 and part != "llm" and "attention" in step.method.needs:
                if tower is not None and tower.no_blocks_reason:
                    raise UserError(f"{step}: {step.method.name} needs the attention of a block, and {tower.no_blocks_reason}")
                raise UserError(f"{step}: {step.method.name} needs the attention of a block, and none has run at @0; use @1")
            _check_needs(step, layer, part, tower)
            budget = _resolve_budget(step, position_name(layer, part), (parts or {}).get(step.method.name))
            if budget.scope == "prompt" and decoder is None:
                raise UserError(f"{step}: this model reads no prompts; write :{replace(budget, scope='image')}")
            runs_in_tower = part != "llm" and not (part == "out" and out_is_projected)
            is_shared = (
                runs_in_tower and packed is None and (budget.scope == "prompt" or (has_tiles and budget.scope == "image"))
            )
            cuts.append(Cut(step, layer, part, seed * 1000 + len(cuts), budget, number, len(positions), is_shared))
    order = {"attn": 0, "block": 1, "out": 2, "llm": 3}
    cuts.sort(key=lambda cut: (cut.part == "llm", cut.layer, order[cut.part]))
    if any(cut.step.rest == "zero" for cut in cuts[:-1]):
        raise UserError(f"{plan}: rest=zero keeps the length, so nothing can follow it; make it the last step")
    in_batch = [cut for cut in cuts if packed is None and cut.part != "llm" and not (cut.part == "out" and out_is_projected)]
    for before, cut in itertools.pairwise(in_batch):
        if before.step.method.adaptive and not cut.step.method.adaptive:
            raise UserError(
                f"{cut.step}: {before.step.method.name} leaves a different number of tokens for each image, so only adaptive "
                "methods can follow it in the tower; put it last, or cut in the language model"
            )
        if before.is_shared:
            raise UserError(
                f"{before.step}: its budget leaves rows of the tower's batch with different numbers of tokens, so it is the "
                f"last cut in the tower; give each tile a budget, as in {before.step.method.name}{before.step.where}:64/tile"
            )
    return cuts


def _check_projected(step: Step, place: str) -> None:
    """Raises a UserError if a method needs more than tokens and text, behind the projector. place: where it has more."""
    if missing := sorted(set(step.method.needs) - {"question", "text"}):
        raise UserError(
            f"{step}: {step.method.name} needs {NEEDS[missing[0]].partition(',')[0]}, and behind the projector of this model "
            f"there are only tokens and text; try {step.method.name}@{place}, or a method that needs tokens only, such as cover"
        )
    if step.method.layers is not None:
        raise UserError(f"{step}: {step.method.name} needs the attention of earlier blocks; behind the projector there is none")


def _check_packed(step: Step, layer: int, part: str, packed: PackedTower) -> None:
    """Raises Uncuttable if a step cannot stand in a tower whose batch is one sequence of patches."""
    name, written = step.method.name, f"{step.method.name}@{layer}"
    if part == "attn":
        raise Uncuttable(f"{step}: the blocks of this tower run whole; cut behind one, as in {written}")
    missing = sorted(set(step.method.needs) - {"question"})
    if missing or step.method.layers is not None:
        wanted = NEEDS[missing[0]].partition(",")[0] if missing else "the attention of earlier blocks"
        raise Uncuttable(
            f"{step}: {name} needs {wanted}, and the tower of this model joins images to one sequence, in which there are only "
            f"tokens; try {name}@llm.2, or a method that needs tokens only, such as divprune"
        )
    if not (step.method.selects and step.rest == "drop") and not (step.merges and not step.keeps_sizes):
        ways = ["rest=drop"] * step.method.selects + ["sizes=no"] * step.merges + [f"{name}@out"]
        advice = " or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))
        raise Uncuttable(
            f"{step}: the attention of this tower takes no bias on keys, so sizes of merged tokens would be lost; use {advice}"
        )
    if step.merges and layer > packed.first_read:
        raise Uncuttable(
            f"{step}: the deep features of block {packed.first_read} are made before this cut and would not be merged; merge "
            f"at @{packed.first_read} or before, or use {name}@out"
        )


def _check_needs(step: Step, layer: int, part: str, tower: Tower | None) -> None:
    """Raises a UserError if a position cannot give what the method needs."""
    needs, name = step.method.needs, step.method.name
    is_head = part == "out" and tower is not None and tower.head is not None
    if "before" in needs and (part not in ("block", "out") or layer == 0 or is_head):
        raise UserError(f"{step}: {name} compares tokens before and after the MLP of a block; use it after a block, as in @6")
    if "values" in needs and part == "llm":
        raise UserError(f"{step}: {name} needs the values of a block of the tower; use it there, as in @6")
    if "pixels" in needs and (part != "block" or layer != 0):
        raise UserError(f"{step}: {name} compares the pixels of patches, so it stands before the first block; use @0")
    if "inputs" in needs and part != "llm":
        raise UserError(f"{step}: {name} needs the input of the language model; use it in the decoder, as in @llm.2")
    if "rotary" in needs and part != "llm":
        raise UserError(f"{step}: {name} needs the rotary embedding of the language model; use it in the decoder, as in @llm.2")
    if step.method.layers is not None and (part == "llm" or tower is None or not tower.depth or layer == 0):
        raise UserError(f"{step}: {name} needs the attention of earlier blocks; use it in a tower with blocks, as in @out")
    if step.method.layers is not None and tower is not None and layer < (last := max(step.method.layers(tower.depth))):
        raise UserError(
            f"{step}: {name} needs the attention of block {last}, which has not run yet; use it at @{last} or later"
        )


def _resolve_budget(step: Step, position: str, part: Any) -> Budget:
    """The budget of the plan, or of the method's options, or that the trained part was made for."""
    trained = part.places() if hasattr(part, "places") else None
    if trained is not None and position not in trained:
        positions = ", ".join(f"@{name}" for name in trained)
        raise UserError(f"{step}: these weights of {step.method.name} were trained for {positions}, not for @{position}")
    if step.budget is not None or step.method.budget is not None:
        return step.resolved_budget()
    keep = part.budget(position) if hasattr(part, "budget") else None
    if keep is None:
        raise UserError(f"{step}: how many tokens? Write for example {step.method.name}@{position}:50%")
    return Budget("keep", Fraction(keep))


def _resolve_decoder_positions(step: Step, decoder: int | None, depth: int) -> list[tuple[int, str]]:
    if decoder is None:
        raise UserError(f"{step}: this model has no language decoder; cut its tower, for example @{depth // 2}")
    positions = []
    for layer in step.resolved_where(depth, decoder).layers:
        counted = layer if layer >= 0 else decoder + layer
        if counted == 0 and step.options.get("attention") == "previous":
            raise UserError(f"{step}: no layer has run before llm.0, so there is no previous attention; use @llm.1")
        if not 0 <= counted < decoder:
            raise UserError(
                f"{step}: no layer {layer} in a decoder of {decoder} layers; allowed are llm.0 to llm.{decoder - 1}, "
                f"or -1 (the last) down to {-decoder}"
            )
        positions.append((counted, "llm"))
    return positions


def position_names(step: Step, tower: Tower) -> list[str]:
    """The names of the positions of a step in a tower."""
    return [position_name(layer, part) for layer, part in _resolve_positions(step, tower.depth)]


def _resolve_positions(step: Step, depth: int, decoder: int = 0) -> list[tuple[int, str]]:
    where = step.resolved_where(depth, decoder)
    if not depth:
        return [(0, "out" if where.part in ("out", "half") else where.part)]  # the handle refuses a tower without blocks
    if where.part in ("out", "half"):
        return [(depth, "out")] if where.part == "out" else [(max(1, depth // 2), "block")]
    lowest = 1 if where.part == "attn" else 0
    positions: list[tuple[int, str]] = []
    for layer in where.layers or range(1, depth + 1):
        counted = layer if layer >= 0 else depth + 1 + layer
        if not lowest <= counted <= depth:
            raise UserError(
                f"{step}: no layer {layer} in a tower of {depth} blocks; allowed are {lowest} to {depth}, "
                f"or -1 (after the last) down to {lowest - depth - 1}"
            )
        positions.append((counted, where.part))
    return positions


def leave_feature(cuts: Sequence[Cut], tower: Tower) -> bool:
    """Whether the cuts leave the image feature of the tower as it is: it is made of CLS, which sees no token behind them."""
    return tower.pools_cls and all(cut.layer == tower.depth for cut in cuts)


def count_note(cut: Cut, n: int, first: int | None = None) -> str | None:
    """The note for a cut that keeps all of n tokens, or more than its budget. first: tokens before any cut; None: n."""
    keep, budget = cut.count(n, first), cut.budget
    if cut.wanted(n, first) == keep and (keep < n or cut.is_allotted or cut.step.method.adaptive):
        return None
    requested = f"{budget.amount} tokens are to be kept" if budget.kind == "keep" else f"the budget is :{budget}"
    arriving = f"{cut.step}: at layer {cut.name} {n} patch tokens arrive and {requested}"
    return arriving + (": everything is kept" if keep == n else f", but {cut.step.method.name} cannot keep fewer than {keep}")


class CountNotes(NamedTuple):
    """Notes on the token counts of a plan."""

    excess: list[str]  # a step keeps more tokens than it says, or all
    others: list[str]


def check_token_counts(cuts: list[Cut], tower: Tower, parts: Mapping[str, Any]) -> CountNotes:
    """Computes the token counts of the plan: an error where no token would be left, notes where more are kept
    than the budget says, or all."""
    excess, notes, n = [], [], tower.grid[0] * tower.grid[1]
    first = n
    for cut in cuts:
        if cut.is_shared:  # of several tiles or images, whose number is not known here
            n = cut.outputs(n, first)
            continue
        keep = cut.count(n, first)
        if keep < 1:
            raise UserError(f"{cut.step}: at layer {cut.name} only {n} patch tokens arrive, so nothing would be left")
        if (note := count_note(cut, n, first)) is not None:
            excess.append(note)
        elif cut.step.method.mixes and (part := parts.get(cut.step.method.name)) and part.budget(cut.name) != keep:
            advice = f", or {part.retraining_for(keep)}" if hasattr(part, "retraining_for") else ""
            raise UserError(
                f"{cut.step}: its weights leave {part.budget(cut.name)} tokens, not {keep}; leave the number out{advice}"
            )
        elif tower.pools_cls and (cut.step.rest == "zero" or leave_feature(cuts, tower)):
            change = "become 0" if cut.step.rest == "zero" else "are cut"
            notes.append(f"{cut.step}: the image feature is the CLS feature and stays as it is; only output tokens {change}")
        n = cut.outputs(n, first)
    return CountNotes(excess, notes)
