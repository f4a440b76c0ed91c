"""A plan on a vision-language model: which calls belong together, and how image features and the question reach the decoder.

The features of videos are computed by a method of their own, and take other placeholders; else a video is an image whose tokens
have a frame, and it is numbered after the images of its batch.

A cut in the tower or behind the projector puts the image features back to their positions, with zeros for the removed tokens,
because transformers compares the number of placeholders with the number of features. Before layer 0 of the decoder the removed
tokens are dropped. `decoder_layers.py` cuts the layers themselves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as replace_fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tokensieve.core import Question, Reduction
from tokensieve.cutting.allotment import allot, image_budgets
from tokensieve.cutting.choice import Chooser
from tokensieve.cutting.decoder_layers import DecoderLayers
from tokensieve.cutting.decoder_state import (
    DecoderCall,
    ImageFeatures,
    Prompt,
    check_features,
    find_prompts,
    longest,
    make_probes,
    question_order,
)
from tokensieve.cutting.packed_tower import PackedCuts, Squares
from tokensieve.cutting.passes import Call, Calls, Pass, Row, UnevenRow, check_sample_count
from tokensieve.cutting.placement import Cut
from tokensieve.cutting.projected import assemble, cut_tiles, fill_tiles, open_tiles
from tokensieve.cutting.tower import TowerCuts
from tokensieve.errors import UserError
from tokensieve.models.image_grid import IMAGE, VIDEO, ImageTokens, name_arguments
from tokensieve.models.patching import is_patched, replace, run_stock
from tokensieve.models.qwen_vl import PIXELS, Placed
from tokensieve.models.resizing import SizeRule
from tokensieve.models.tower import Undo
from tokensieve.models.vlm import Vlm

# for each image: its number of placeholders, and those that hold a token, (K,); the sizes of these tokens, (I, K)
Left = tuple[list[int], list[Tensor], Tensor | None]


class DecoderCuts:
    """The cuts of a plan in the decoder of a vision-language model.

    cuts: by layer; layer 0 is always included if the tower is cut. tower: the cuts in the tower, if it can be opened.
    resize: how images of any size are made smaller (`Vlm.images`). projected: the cuts behind the projector. packed: the cuts
    in a tower whose batch is one sequence.
    """

    def __init__(
        self,
        vlm: Vlm,
        cuts: Mapping[int, list[Cut]],
        tower: TowerCuts | None,
        chooser: Chooser,
        calls: Calls,
        plan: str,
        resize: SizeRule | None = None,
        projected: Sequence[Cut] = (),
        packed: PackedCuts | None = None,
    ) -> None:
        self.vlm, self.tower, self.chooser, self.calls, self.plan, self.resize = vlm, tower, chooser, calls, plan, resize
        self.projected, self.packed = projected, packed
        self.layers = DecoderLayers(vlm, cuts, chooser, calls, plan)

    # --- attach -------------------------------------------------------------------------------------------------

    @property
    def has_plan(self) -> bool:
        """Whether a plan is attached to the model."""
        return is_patched(self.vlm.inner, "get_image_features")

    def attach(self, undo: list[Undo]) -> None:
        """Attaches the cuts, and adds the functions that remove them, in reverse order."""
        model, inner, decoder = self.vlm.model, self.vlm.inner, self.vlm.decoder
        if self.packed is not None:
            self.packed.attach(undo)
        for medium in self._media():
            undo.append(self._patch(inner, f"get_{medium}_features", functools.partial(self._get_features, medium)))
        undo += [
            self._patch(inner, self.vlm.merger, self._merge),
            self._patch(decoder.module, "forward", self.layers.run_decoder),
            self._patch(inner, "forward", self._run_inner),
        ]
        if self.resize is not None:
            undo.append(self._patch(inner, "get_rope_index", self._get_rope_index))
        if self._cuts_tiles:
            undo.append(self._patch(inner, "pack_image_features", self._pack_tiles))
        if model is not inner:
            undo.append(self._patch(model, "forward", self._run_model))
        if hasattr(model, "generate"):
            undo.append(self._patch(model, "prepare_inputs_for_generation", self._prepare_step))
            undo.append(self._patch(model, "generate", self._generate))
        for number in self.layers.patched:
            undo.append(self._patch(decoder.layers[number], "forward", functools.partial(self.layers.run_layer, number)))

    def _media(self) -> list[str]:
        """What the model takes: images, and maybe videos."""
        return [IMAGE, VIDEO] if VIDEO in self.vlm.layouts else [IMAGE]

    def _patch(self, owner: Any, name: str, planned: Callable[..., Any]) -> Undo:
        """Replaces a method by planned(stock, *args, **kwargs), and reports the work of both to the observer."""

        def call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.chooser.observer is None:
                return planned(method, *args, **kwargs)

            def stock(*args: Any, **kwargs: Any) -> Any:
                with self.chooser.model_work():
                    return method(*args, **kwargs)

            with self.chooser.plan_work():
                return planned(stock, *args, **kwargs)

        return replace(owner, name, call)

    # --- calls of the model -------------------------------------------------------------------------------------

    def _generate(self, stock: Callable[..., Any], inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """generate() is one call. It may compute image features before its first step, so the prompt is recorded here."""
        call = self._new_call()

        def run() -> Any:
            ids = kwargs.get("input_ids", inputs)
            call.decoder.prompt = Prompt(ids, kwargs.get("attention_mask"))
            call.decoder.prompt_length = None if ids is None else ids.shape[1]
            return stock(inputs, *args, **kwargs)

        return self.calls.run(call, run)

    def _prepare_step(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """generate() calls this before each step: only the next forward belongs to it."""
        if self.calls.is_open:
            call = self.calls.current
            if call.decoder.prompt is not None and call.decoder.run is None:
                call.decoder.expects_step = True
                call.entered.clear()
        return stock(*args, **kwargs)

    def _run_model(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call, run = self._join(lambda call: call.decoder.expects_step)
        call.decoder.expects_step, call.decoder.labels = False, kwargs.get("labels")
        return run(stock, *args, **kwargs)

    def _run_inner(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = (id(self.vlm.inner), "forward")
        call, run = self._join(lambda call: key not in call.entered and call.decoder.run is None)
        call.entered.add(key)
        state = call.decoder
        if state.prompt_length is None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            state.prompt = Prompt(ids, kwargs.get("attention_mask"))
        state.image_masks, state.arguments = {}, name_arguments(self.vlm.inner.forward, args, kwargs)
        return run(self._run_with_decoder, call, stock, *args, **kwargs)

    def _run_with_decoder(self, call: Call, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs what puts image features into the sequence; a UserError if the decoder did not take their positions."""
        out = stock(*args, **kwargs)
        if call.decoder.image_masks:
            raise UserError(
                "the decoder ran without the plan: somebody has set its forward since; remove() the plan and apply it again"
            )
        return out

    def _join(self, belongs: Callable[[Call], bool]) -> tuple[Call, Callable[..., Any]]:
        """The call under way if this belongs to it, else a new one; and a function that runs a function in it."""
        if self.calls.is_open and belongs(self.calls.current):
            return self.calls.current, run_stock
        call = self._new_call()
        return call, functools.partial(self.calls.run, call)

    def _new_call(self) -> Call:
        """A call that starts with the image features that this thread computed last: the caller may pass them in."""
        latest, call = self.calls.latest, self.calls.new_call()
        if latest is not None:
            call.decoder = DecoderCall(features=dict(latest.decoder.features), are_used=latest.decoder.are_used)
            call.tower = call.features_pass = latest.features_pass
        return call

    # --- image features -----------------------------------------------------------------------------------------

    def _get_features(self, medium: str, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.calls.is_open and self.calls.current.decoder.is_computing:  # Qwen3-VL computes those of videos as images
            return stock(*args, **kwargs)
        call, run = self._join(lambda call: call.decoder.run is None)
        call.decoder.is_computing = True
        try:
            return run(self._compute_features, medium, call, stock, *args, **kwargs)
        finally:
            call.decoder.is_computing, call.squares = False, None

    def _compute_features(self, medium: str, call: Call, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The features of images or videos at their positions among all placeholders; zeros for what was removed."""
        state, inner = call.decoder, self.vlm.inner
        if medium in state.features or state.are_used:  # else they join those of the other medium
            state.features, state.are_used, call.tower = {}, False, None
        placed, named = None, name_arguments(getattr(inner, f"get_{medium}_features"), args, kwargs)
        if self.resize is not None and self.vlm.images is not None:
            named, placed = self.vlm.images.resize(medium, self.resize, named)
        layouts = self._layouts(medium, named, call)
        if self._cuts_tiles:
            self._check_tiles(medium, layouts)
            state.layouts = layouts
        first = len(call.tower.samples) if state.features and call.tower else 0
        left: Left | None = None
        if self.packed is not None:
            device = named[PIXELS[medium]].device
            left = self._left_before_cuts(medium, placed, call, len(layouts), device)
            lengths = [layout.total for layout in layouts] if left is None else left[0]
            call.squares = Squares(layouts, first, *self._of_prompts(medium, call, lengths))
        out = stock(*args, **kwargs) if placed is None else stock(**named)
        features = _split(out.pooler_output, layouts)
        if call.tower is not None and call.tower.counts is not None and not layouts:  # without padding
            features = [feature[:n] for feature, n in zip(features, call.tower.counts.tolist(), strict=True)]
        device = features[0].device
        streams = [features, *(_split(layer, layouts) for layer in getattr(out, "deepstack_features", None) or ())]
        stays = [layout.fixed().to(device) for layout in layouts]
        stays = stays if any(map(len, stays)) else []
        if self._cuts_tiles:
            layouts, left = self._left_of_tiles(call, layouts)
        elif call.squares is None:
            left = self._left_before_cuts(medium, placed, call, len(features), device)
        lengths, kept, sizes = left or ([len(feature) for feature in features], None, None)
        assert call.tower is not None
        call.tower.layouts = [*call.tower.layouts, *layouts]
        grids, frames = self._grids(call.tower, layouts, len(features)), None
        if self.projected or call.squares is not None:
            sized = [mark[:, 1] for mark in call.decoder.packed] if sizes is not None else None
            whole = open_tiles(layouts, device) if call.squares is None else call.squares.left()
            tiles, about = fill_tiles(whole, streams, sized), self._of_prompts(medium, call, lengths)
            done = assemble(cut_tiles(self.projected, self.chooser, call, first, tiles, *about))
            kept = done.kept if placed is None else [at[new] for at, new in zip(placed.kept, done.kept, strict=True)]
            sizes = None if done.sizes is None else pad_sequence(done.sizes, batch_first=True)
            streams, grids, frames = _with_fixed(done.streams, streams, stays), (), done.frames
        elif self._cuts_tiles and kept is not None:  # whose zeros are there already
            streams = _with_fixed([[stream[at] for stream, at in zip(streams[0], kept, strict=True)]], streams, stays)
        if kept is not None:
            held = [torch.cat(parts) for parts in zip(kept, stays, strict=True)] if stays else kept
            streams = [_spread(stream, held, lengths) for stream in streams]
            out.pooler_output = _like(out.pooler_output, streams[0])
            if len(streams) > 1:
                out.deepstack_features = [_like(*each) for each in zip(out.deepstack_features, streams[1:], strict=True)]
        elif stays:
            kept = [layout.movable().to(device) for layout in layouts]
        probes = make_probes(streams[0], kept, lengths)
        made = ImageFeatures(lengths, probes, kept, sizes, grids, frames, stays or None, first)
        state.features, call.features_pass = state.features | {medium: made}, call.tower
        state.has_new_features = True
        return out

    def _of_prompts(
        self, medium: str, call: Call, lengths: Sequence[int]
    ) -> tuple[Callable[[], Question | None], Callable[[], list[int]]]:
        """The question and the prompt of each image, of so many placeholders, for methods that ask."""
        question = functools.partial(self.question_about, call, lengths, medium)
        return question, functools.partial(self.prompts_of, call, lengths, medium)

    @property
    def _cuts_tiles(self) -> bool:
        """Whether the plan cuts a tower that sees tiles of images."""
        return self.vlm.tile_tower is not None and self.tower is not None and self.tower.is_changed

    def _check_tiles(self, medium: str, layouts: Sequence[ImageTokens]) -> None:
        """Raises a UserError if patches of these tiles cannot be missing."""
        advice = "so none of their patches can be missing; cut @out or @llm.L"
        if medium == VIDEO:
            raise UserError(f"{self.plan}: {self.vlm.family} averages the patches of a frame, {advice}")
        if any(layout.is_averaged for layout in layouts):
            raise UserError(f"{self.plan}: {self.vlm.family} averages the tiles of an image that has many, {advice}")

    def _pack_tiles(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The tiles of images packed by the model, with zeros for removed patches. Marks of the others are packed alike."""
        named = name_arguments(self.vlm.inner.pack_image_features, args, kwargs)
        call, tower = self.calls.current, self.vlm.tile_tower
        assert call.tower is not None and tower is not None
        state, n = call.tower, tower.grid[0] * tower.grid[1]
        features: list[Tensor] = []
        marks: list[Tensor] = []
        first = 0
        for tiles in named["image_features"]:  # (T, K, E) of each image
            rows = slice(first, first + len(tiles))
            first += len(tiles)
            at = torch.arange(n, device=tiles.device).expand(len(tiles), -1)
            at = at if state.patch_index is None else state.patch_index[rows]  # (T, K)
            real = torch.ones(at.shape, device=at.device)
            if state.counts is not None:
                real = (torch.arange(at.shape[1], device=at.device) < state.counts[rows, None]).float()
            sizes = real if state.sizes is None else state.sizes[rows].float()
            row = torch.arange(len(tiles), device=at.device)[:, None]
            mark = torch.stack([real, real * sizes], dim=-1)  # (T, K, 2)
            for values, placed in ((tiles * real[..., None].to(tiles.dtype), features), (mark, marks)):
                zeros = values.new_zeros((len(tiles), n, values.shape[2]))
                placed.append(zeros.index_put((row, at), values, accumulate=True))  # padding, which is 0, may be anywhere
        packed, _ = stock(**named | {"image_features": marks, "image_newline": marks[0].new_zeros(2)})
        call.decoder.packed = list(packed)
        return stock(**named | {"image_features": features})

    def _left_of_tiles(self, call: Call, layouts: Sequence[ImageTokens]) -> tuple[list[ImageTokens], Left]:
        """What the tower left of the tiles of each image; from here on, the pass is about images."""
        state, marks = call.tower, call.decoder.packed
        assert state is not None
        firsts = torch.tensor([0, *itertools.accumulate(layout.rows for layout in layouts)][:-1], device=state.samples.device)
        held = [mark[:, 0] > 0 for mark in marks]
        only = [layout.only(each.cpu()) for layout, each in zip(layouts, held, strict=True)]
        kept = [layout.movable().to(each.device) for layout, each in zip(only, held, strict=True)]
        of_kept = [mark[at, 1] for mark, at in zip(marks, kept, strict=True)]
        sizes = pad_sequence(of_kept, batch_first=True) if any(bool((size != 1).any()) for size in of_kept) else None
        after = Pass(state.samples[firsts], grid=None, has_full_grid=True, ledger=state.ledger, is_uneven=len(layouts) > 1)
        if state.stages:  # all cuts of the tower as one: in the tokens of the first image
            index = torch.searchsorted(layouts[0].movable().to(kept[0].device), kept[0])
            after.stages.append((state.stages[-1][0], Reduction(index[None], len(layouts[0].movable()))))
        call.tower = after
        return only, ([layout.total for layout in layouts], kept, sizes)

    def _layouts(self, medium: str, named: Mapping[str, Any], call: Call) -> list[ImageTokens]:
        """The tokens of each image or video, of a family that describes them."""
        if medium not in self.vlm.layouts:
            return []
        ids = None if call.decoder.prompt is None else call.decoder.prompt.ids
        return self.vlm.layouts[medium](self.vlm.inner, named, ids)

    def _grids(self, state: Pass, layouts: Sequence[ImageTokens], images: int) -> Sequence[tuple[int, ...] | None]:
        """`View.grid` of the tokens of each image; empty: unknown."""
        if layouts:
            return [layout.grid for layout in layouts]
        return [state.grid] * images if state.has_full_grid and not state.stages else ()

    def _get_rope_index(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self.resize is not None and self.vlm.images is not None
        return self.vlm.images.rope_index(stock, self.resize, args, kwargs)

    def _left_before_cuts(
        self, medium: str, placed: Placed | None, call: Call, images: int, device: torch.device
    ) -> Left | None:
        """What resizing, or the tower, left of these images; None: all. Starts a pass, where the tower has not."""
        return self._left_by_tower(call, images, device) if placed is None else self._left_of(medium, placed, call, device)

    def _left_of(self, medium: str, placed: Placed, call: Call, device: torch.device) -> Left:
        """Starts a pass with smaller images, and records them."""
        call.tower = self._start_pass(call, len(placed.lengths), device)
        before, counts = max(placed.lengths), [len(kept) for kept in placed.kept]
        is_even = len({*placed.lengths}) == len({*counts}) == 1
        call.tower.ledger.append(Row(medium, before, counts[0]) if is_even else UnevenRow.of_counts(medium, before, counts))
        if placed.note:
            self.chooser.notes.warn(f"{self.plan}: {placed.note}")
        return placed.lengths, [kept.to(device) for kept in placed.kept], None

    def _start_pass(self, call: Call, images: int, device: torch.device) -> Pass:
        """A pass for images whose tower is not cut; or the one of the images whose features they join."""
        known = call.tower if call.decoder.features else None
        before = 0 if known is None else len(known.samples)
        if call.samples is None:
            ids = self.calls.number_samples(images, device)
        else:
            ids = call.samples[before : before + images].to(device)
            if len(ids) < images:
                check_sample_count(call.samples, before + images)
        if known is not None:
            return replace_fields(known, samples=torch.cat([known.samples, ids]))
        grid = None if self.vlm.tower is None else self.vlm.tower.grid
        return Pass(samples=ids, grid=grid, has_full_grid=True)

    def _left_by_tower(self, call: Call, images: int, device: torch.device) -> Left | None:
        """What the tower kept of these images; None: all."""
        if self.tower is None or not self.tower.is_changed:  # the tower is not cut, so it started no pass
            call.tower = self._start_pass(call, images, device)
            return None
        state = call.tower
        assert state is not None
        resized = self.tower.resized
        if state.patch_index is None and resized is None:
            return None
        if not state.has_full_grid or state.grid is None:
            raise UserError("patches are missing before the first cut (patch dropout), so their positions are unknown")
        h, w = state.grid
        if resized is None:
            assert state.patch_index is not None
            return [h * w] * images, _real(state.patch_index, state.counts), state.sizes
        positions, (full_h, full_w) = resized.positions(device), resized.full_grid
        kept = positions.expand(images, -1) if state.patch_index is None else positions[state.patch_index]
        return [full_h * full_w] * images, _real(kept, state.counts), state.sizes

    def _merge(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Finds the placeholders of the image features that are put into the sequence here."""
        out = stock(*args, **kwargs)
        named = name_arguments(getattr(self.vlm.inner, self.vlm.merger), args, kwargs)
        state = self.calls.current.decoder
        for medium in self._media():
            if (features := named.get(f"{medium}_features", named.get(f"{medium}_hidden_states"))) is not None:
                check_features(features, state.features.get(medium))
                state.image_masks[medium] = self._placeholders(medium, named["input_ids"], named["inputs_embeds"])
        return out

    def _placeholders(self, medium: str, ids: Tensor | None, embeds: Tensor) -> Tensor:
        """The placeholders of images or videos, (B, L), among input ids, or else among their embeddings (B, L, E)."""
        token: int = getattr(self.vlm.inner.config, f"{medium}_token_id")
        if ids is not None:
            return ids == token
        own: Tensor = self.vlm.inner.get_input_embeddings()(torch.tensor(token, device=embeds.device))
        return (embeds == own).all(-1)

    def share(self, cut: Cut, call: Call, counts: Sequence[int]) -> list[int]:
        """The tokens that each row of the tower's batch, with so many tokens, keeps of a budget that they share."""
        layouts, left = call.decoder.layouts, iter(counts)
        of_images = [[next(left) for _ in range(layout.rows)] for layout in layouts] or [[count] for count in counts]
        prompts: list[int] = []
        if cut.budget.scope == "prompt":
            assert self.tower is not None
            h, w = self.tower.tower.grid if self.tower.resized is None else self.tower.resized.full_grid
            prompts = self.prompts_of(call, [layout.total for layout in layouts] or [h * w] * len(counts))
        assert call.tower is not None
        firsts = [call.tower.first * len(own) for own in of_images]
        budgets = image_budgets(cut, self.chooser, [sum(own) for own in of_images], firsts, prompts)
        return [share for total, own in zip(budgets, of_images, strict=True) for share in allot(total, own)]

    def prompts_of(self, call: Call, lengths: Sequence[int], medium: str = IMAGE) -> list[int]:
        """The prompt that each image is in. lengths: the number of placeholders of each image, or video."""
        ids = None if call.decoder.prompt is None else call.decoder.prompt.ids
        if ids is None:
            raise UserError(f"{self.plan}: a budget of the whole prompt needs the prompt; call the model with input_ids")
        placeholders = ids == getattr(self.vlm.inner.config, f"{medium}_token_id")  # (B, L)
        return find_prompts(placeholders.sum(1).tolist(), lengths)

    def question_about(self, call: Call, lengths: Sequence[int], medium: str = IMAGE) -> Question | None:
        """The question of the prompt of each image whose features are being computed, as input embeddings of the decoder.

        lengths: the number of placeholders of each image, or video.
        """
        prompt, config = call.decoder.prompt, self.vlm.inner.config
        if prompt is None or prompt.ids is None:
            return None
        ids, mask = prompt.ids, prompt.attention_mask
        placeholders = ids == getattr(config, f"{medium}_token_id")  # (B, L)
        rows = self.prompts_of(call, lengths, medium)
        inside = torch.stack([ids == getattr(config, f"{each}_token_id") for each in self._media()]).any(0)
        for row, at in zip(rows, placeholders.nonzero()[:, 1].split(list(lengths)), strict=True):
            inside[row, at[0] : at[-1] + 1] = True  # timestamps between frames are no question
        real = torch.ones_like(placeholders) if mask is None else mask.to(ids.device, torch.bool)
        question = call.decoder.question_mask(call.context, real[:, -ids.shape[1] :], inside)
        order = question_order(question, longest(question))
        words = self.vlm.inner.get_input_embeddings()(ids.gather(1, order))
        return Question(words, question.gather(1, order)).rows(torch.tensor(rows, device=ids.device))


def _real(kept: Tensor, counts: Tensor | None) -> list[Tensor]:
    """What is kept of each image, (B, K), without padding; counts: (B,), None: there is none."""
    return list(kept) if counts is None else [each[:n] for each, n in zip(kept, counts.tolist(), strict=True)]


def _spread(features: Sequence[Tensor], kept: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """The features (K, E) of each image at their placeholders, zeros at the others: (N, E) each."""
    return [
        feature.new_zeros((n, feature.shape[1])).index_copy(0, at, feature)
        for feature, at, n in zip(features, kept, lengths, strict=True)
    ]


def _with_fixed(
    cut: Sequence[Sequence[Tensor]], streams: Sequence[Sequence[Tensor]], fixed: Sequence[Tensor]
) -> list[list[Tensor]]:
    """The tokens that are left (K, E) of each image, and behind them those that stay in place, of all its tokens (N, E)."""
    if not fixed:
        return [list(stream) for stream in cut]
    return [
        [torch.cat([left, tokens[at]]) for left, tokens, at in zip(*each, fixed, strict=True)]
        for each in zip(cut, streams, strict=True)
    ]


def _split(handed: Tensor | Sequence[Tensor], layouts: Sequence[ImageTokens]) -> list[Tensor]:
    """The tokens of each image, (N, E): of a list, or of a batch (..., E) in which they follow one another."""
    if not layouts:
        return list(handed)
    flat = handed.flatten(0, -2) if isinstance(handed, Tensor) else torch.cat(list(handed))
    totals = [layout.total for layout in layouts]
    if sum(totals) != len(flat):
        raise UserError(f"the projector handed over {len(flat)} tokens, but its images have {sum(totals)}")
    return list(flat.split(totals))


def _like(handed: Tensor | Sequence[Tensor], images: Sequence[Tensor]) -> Tensor | list[Tensor]:
    """The tokens of all images in the form in which the model handed them over."""
    if not isinstance(handed, Tensor):
        return list(images)
    flat = torch.cat(list(images))  # (N of all images, E)
    return flat if handed.dim() == 2 else flat.unflatten(0, (len(handed), -1))
