"""A plan on a vision-language model: which calls belong together, and how image features and the question reach the decoder.

A cut in the tower puts the image features back to their positions, with zeros for the removed patches, because transformers
compares the number of placeholders with the number of features. Before layer 0 of the decoder the removed tokens are dropped.
`decoder_layers.py` cuts the layers themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokensieve.core import Question
from tokensieve.cutting.choice import Chooser
from tokensieve.cutting.decoder_layers import DecoderLayers
from tokensieve.cutting.decoder_state import (
    DecoderCall,
    ImageFeatures,
    Prompt,
    check_features,
    longest,
    make_probes,
    question_order,
)
from tokensieve.cutting.passes import IMAGE, Call, Calls, Pass, Row, UnevenRow, check_sample_count
from tokensieve.cutting.placement import Cut
from tokensieve.cutting.tower import TowerCuts
from tokensieve.errors import UserError
from tokensieve.models.image_grid import SIZES, name_arguments
from tokensieve.models.patching import is_patched, replace, run_stock
from tokensieve.models.qwen_vl import Placed
from tokensieve.models.resizing import SizeRule
from tokensieve.models.tower import Undo
from tokensieve.models.vlm import Vlm

# for each image: its number of placeholders, and those that hold a token, (K,); the sizes of these tokens, (I, K)
Left = tuple[list[int], list[Tensor], Tensor | None]


class DecoderCuts:
    """The cuts of a plan in the decoder of a vision-language model.

    cuts: by layer; layer 0 is always included if the tower is cut. tower: the cuts in the tower, if it can be opened.
    resize: how images of any size are made smaller (`Vlm.images`).
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
    ) -> None:
        self.vlm, self.tower, self.chooser, self.calls, self.plan, self.resize = vlm, tower, chooser, calls, plan, resize
        self.layers = DecoderLayers(vlm, cuts, chooser, calls, plan)

    # --- attach -------------------------------------------------------------------------------------------------

    @property
    def has_plan(self) -> bool:
        """Whether a plan is attached to the model."""
        return is_patched(self.vlm.inner, "get_image_features")

    def attach(self, undo: list[Undo]) -> None:
        """Attaches the cuts, and adds the functions that remove them, in reverse order."""
        model, inner, decoder = self.vlm.model, self.vlm.inner, self.vlm.decoder
        undo += [
            self._patch(inner, "get_image_features", self._get_image_features),
            self._patch(inner, "get_placeholder_mask", self._get_placeholder_mask),
            self._patch(decoder.module, "forward", self.layers.run_decoder),
            self._patch(inner, "forward", self._run_inner),
        ]
        if self.resize is not None:
            undo.append(self._patch(inner, "get_rope_index", self._get_rope_index))
        if model is not inner:
            undo.append(self._patch(model, "forward", self._run_model))
        if hasattr(model, "generate"):
            undo.append(self._patch(model, "prepare_inputs_for_generation", self._prepare_step))
            undo.append(self._patch(model, "generate", self._generate))
        for number in self.layers.patched:
            undo.append(self._patch(decoder.layers[number], "forward", functools.partial(self.layers.run_layer, number)))

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
        state.image_mask = None
        return run(self._run_with_decoder, call, stock, *args, **kwargs)

    def _run_with_decoder(self, call: Call, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs what puts image features into the sequence; a UserError if the decoder did not take their positions."""
        out = stock(*args, **kwargs)
        if call.decoder.image_mask is not None:
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
            call.decoder = DecoderCall(features=latest.decoder.features)
            call.tower = call.features_pass = latest.features_pass
        return call

    # --- image features -----------------------------------------------------------------------------------------

    def _get_image_features(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call, run = self._join(lambda call: call.decoder.run is None)
        return run(self._compute_features, call, stock, *args, **kwargs)

    def _compute_features(self, call: Call, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The image features at their positions among all placeholders; zeros for what the tower removed."""
        placed, named = None, name_arguments(self.vlm.inner.get_image_features, args, kwargs)
        if self.resize is not None and self.vlm.images is not None:
            named, placed = self.vlm.images.resize(self.resize, args, kwargs)
            out = stock(**named)
        else:
            out = stock(*args, **kwargs)
        features: Sequence[Tensor] = out.pooler_output
        if call.tower is not None and call.tower.counts is not None:  # without the padding of images with fewer tokens
            features = [feature[:n] for feature, n in zip(features, call.tower.counts.tolist(), strict=True)]
        device = features[0].device
        left = self._left_by_tower(call, len(features), device) if placed is None else self._left_of(placed, call, device)
        lengths, kept, sizes = left or ([len(feature) for feature in features], None, None)
        probes = make_probes(features, kept, lengths)
        if kept is not None:
            out.pooler_output = _spread(features, kept, lengths)
            if getattr(out, "deepstack_features", None) is not None:
                out.deepstack_features = [_spread(layer, kept, lengths) for layer in out.deepstack_features]
        assert call.tower is not None
        call.tower.image_sizes = {name: named[name] for name in SIZES if name in named}
        call.decoder.features, call.features_pass = ImageFeatures(lengths, probes, kept, sizes), call.tower
        call.decoder.has_new_features = True
        return out

    def _get_rope_index(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self.resize is not None and self.vlm.images is not None
        return self.vlm.images.rope_index(stock, self.resize, args, kwargs)

    def _left_of(self, placed: Placed, call: Call, device: torch.device) -> Left:
        """Starts a pass with smaller images, and records them."""
        call.tower = self._new_pass(call, len(placed.lengths), device)
        before, counts = max(placed.lengths), [len(kept) for kept in placed.kept]
        is_even = len({*placed.lengths}) == len({*counts}) == 1
        call.tower.ledger.append(Row(IMAGE, before, counts[0]) if is_even else UnevenRow.of_counts(IMAGE, before, counts))
        if placed.note:
            self.chooser.notes.warn(f"{self.plan}: {placed.note}")
        return placed.lengths, [kept.to(device) for kept in placed.kept], None

    def _new_pass(self, call: Call, images: int, device: torch.device) -> Pass:
        """A pass for images whose tower is not cut."""
        if call.samples is not None:
            check_sample_count(call.samples, images)
        ids = self.calls.number_samples(images, device) if call.samples is None else call.samples.to(device)
        grid = None if self.vlm.tower is None else self.vlm.tower.grid
        return Pass(samples=ids, grid=grid, has_full_grid=True)

    def _left_by_tower(self, call: Call, images: int, device: torch.device) -> Left | None:
        """What the tower kept of these images; None: all."""
        if self.tower is None or not self.tower.is_changed:  # the tower is not cut, so it started no pass
            call.tower = self._new_pass(call, images, device)
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

    def _get_placeholder_mask(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        features = kwargs.get("image_features", args[2] if len(args) > 2 else None)
        if features is not None:
            state = self.calls.current.decoder
            check_features(features, state.features)
            mask = out[0] if isinstance(out, tuple) else out
            state.image_mask = mask[..., 0] if mask.dim() == 3 else mask  # (B, L)
        return out

    def question_about(self, call: Call, images: int, tokens: int) -> Question | None:
        """The question of the prompt of each image whose features are being computed, as input embeddings of the decoder.

        tokens: the number of placeholders of each image.
        """
        prompt = call.decoder.prompt
        if prompt is None or prompt.ids is None:
            return None
        ids, mask = prompt.ids, prompt.attention_mask
        placeholders = ids == self.vlm.inner.config.image_token_id  # (B, L)
        counts = placeholders.sum(1) // tokens
        if (found := int(counts.sum())) != images:
            raise UserError(f"{images} images, but the prompts have placeholders for {found}, of {tokens} tokens each")
        real = torch.ones_like(placeholders) if mask is None else mask.to(ids.device, torch.bool)
        question = call.decoder.question_mask(call.context, real[:, -ids.shape[1] :], placeholders)
        rows = torch.arange(len(ids), device=ids.device).repeat_interleave(counts)
        order = question_order(question, longest(question))
        words = self.vlm.inner.get_input_embeddings()(ids.gather(1, order))
        return Question(words, question.gather(1, order)).rows(rows)


def _real(kept: Tensor, counts: Tensor | None) -> list[Tensor]:
    """What is kept of each image, (B, K), without padding; counts: (B,), None: there is none."""
    return list(kept) if counts is None else [each[:n] for each, n in zip(kept, counts.tolist(), strict=True)]


def _spread(features: Sequence[Tensor], kept: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """The features (K, E) of each image at their placeholders, zeros at the others: (N, E) each."""
    return [
        feature.new_zeros((n, feature.shape[1])).index_copy(0, at, feature)
        for feature, at, n in zip(features, kept, lengths, strict=True)
    ]
