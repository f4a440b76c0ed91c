"""Decoder layers behind a cut: they run on the tokens that are left, and the key/value cache records which those are.

Each layer gets the tokens that are left, and its output is written back to their positions. So the model around the layers
(deep features, final norm, head, loss) sees the original length; a dropped token keeps its last state. If the last token of a
prompt was dropped, because the prompt ends with an image, it gets the output of the last one that is left. Position ids are the
original ones. The cache of a layer holds only the tokens that the layer processed. Which of its entries may be attended to is
recorded on the cache itself, so that generation can continue from it: step by step, in batches with padding, with beams, from a
copy of the cache, or after it was cropped.

Merged tokens keep their sizes in the decoder: log(size) is added to the attention logits of their keys, so that a token
merged from five patches gets the attention weight of five. Flash attention supports no bias; there every token counts once.

With a soft reduction nothing is dropped: log(soft) is added to the attention logits of the keys from this layer on. Where soft
is 0 or 1, this equals dropping. Later cuts know the probability that a token is still there, and count by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokensieve.core import Question, Reduction, View
from tokensieve.cutting.cache import CacheRecord, Stage, cache_record, cached_length, pruned_cache_class
from tokensieve.cutting.choice import Chooser
from tokensieve.cutting.decoder_state import DecoderPass, ImageGroup, flat_index, gather_rows, group_images, pack_question
from tokensieve.cutting.passes import Call, Calls
from tokensieve.cutting.placement import Cut
from tokensieve.errors import UserError
from tokensieve.models.vlm import Vlm
from tokensieve.scoring import Attention

MIN_KEEP_PROBABILITY = torch.finfo(torch.float32).tiny  # the smallest probability whose logarithm is taken


class DecoderLayers:
    """The cuts of a plan in the layers of a decoder.

    cuts: by layer; layer 0 is always included if the tower is cut, with or without a cut of its own.
    """

    def __init__(self, vlm: Vlm, cuts: Mapping[int, list[Cut]], chooser: Chooser, calls: Calls, plan: str) -> None:
        self.vlm, self.cuts, self.chooser, self.calls, self.plan = vlm, cuts, chooser, calls, plan

    @property
    def first(self) -> int:
        """The first layer behind a cut; the depth of the decoder where there is none."""
        return min(self.cuts, default=self.vlm.decoder.depth)

    def run_decoder(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The decoder's forward: one pass over its layers."""
        call = self.calls.current
        state = call.decoder
        outer, run = state.run, self._start_pass(call, args, kwargs)
        state.run = run
        try:
            out = stock(*args, **kwargs)
        finally:
            state.run = outer
        if run is not None:
            self._check_order(run, min(self.vlm.decoder.depth, self.vlm.decoder.module.config.num_hidden_layers))
        return out

    def _check_order(self, run: DecoderPass, number: int) -> None:
        """Raises a UserError if a layer before this one ran without the plan."""
        expected = max(run.next_layer, self.first)
        if expected < number:
            raise UserError(
                f"layer {expected} of the decoder ran without the plan: somebody has set its forward since; "
                "remove() the plan and apply it again"
            )
        run.next_layer = number + 1

    def _start_pass(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DecoderPass | None:
        """The pass for these arguments of the decoder; None where there is nothing to cut."""
        state = call.decoder
        image_mask, state.image_mask = state.image_mask, None
        cache = kwargs.get("past_key_values")
        record = cache_record(cache)
        x = kwargs.get("inputs_embeds")
        if x is None:  # the decoder was called directly, with text only
            x = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        batch, length = x.shape[:2]
        if image_mask is None and record is None:
            if length > 1 and not cached_length(cache, 0):
                if not state.has_new_features:
                    call.tower = None  # the images of an earlier call are not part of this one
                self.chooser.notes.warn(
                    f"{self.plan}: nothing is cut, because the prompt has no image or its features are not recognised"
                )
            return None
        if record is not None and record.plan != self.plan:
            raise UserError(
                f"this cache was filled under the plan {record.plan}, but {self.plan} is attached now; start without a cache"
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise UserError(
                "a plan in the decoder needs an attention mask of shape (batch, length), or none: call generate() without a "
                "static cache, and the model without a custom mask"
            )
        n_before = cached_length(cache, 0) if record is None else record.n_tokens_fed
        if mask is not None and mask.shape[1] != n_before + length:
            raise UserError(
                f"the attention mask is for {mask.shape[1]} tokens, but there are {n_before} cached and {length} new tokens"
            )
        self.vlm.decoder.check(length + n_before)
        past, real = None, torch.ones((batch, length), dtype=torch.bool, device=x.device)
        if mask is not None:
            real = mask.to(x.device, torch.bool)
            past, real = real[:, :n_before], real[:, n_before:]
        if image_mask is None:
            return DecoderPass(past, real, real, [], torch.ones_like(real))
        assert state.features is not None  # by check_features
        groups = group_images(image_mask, state.features)
        left = torch.ones_like(real)
        for group in groups:
            left[group.rows] &= ~image_mask[group.rows]
        for group in groups:
            left[group.rows[:, None], group.at] = True
        run = DecoderPass(past, real, state.question_mask(call.context, real, image_mask), groups, left)
        for group in groups:
            if group.sizes is not None:
                self._add_weight(run, group.rows, group.at, group.sizes)
        return run

    def _add_weight(self, run: DecoderPass, rows: Tensor, at: Tensor, factor: Tensor) -> None:
        """Multiplies the attention weight of the tokens at (G, N) of these rows by factor (G, N), if the kernel can."""
        if not self.vlm.decoder.takes_bias:
            return
        bias = torch.zeros(run.real.shape, device=at.device) if run.bias is None else run.bias
        run.bias = bias.index_put((rows[:, None], at), factor.float().log(), accumulate=True)

    def run_layer(self, number: int, stock: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """A layer's forward. hidden_states: (B, L, D)."""
        call, x = self.calls.current, hidden_states
        run = call.decoder.run
        if run is None:
            return stock(x, *args, **kwargs)
        self._check_order(run, number)
        if run.left.device != x.device:
            run.to(x.device)
        tables: tuple[Tensor, Tensor] = kwargs["position_embeddings"]
        if number in self.cuts:
            for cut in self.cuts[number]:
                x = self._cut(cut, number, x, tables, call, run)
            self._start_stage(number, x, kwargs.get("past_key_values"), run)
            run.tables = (
                tables if run.at is None else tuple(gather_rows(table.expand(len(x), -1, -1), run.at) for table in tables)
            )
        kwargs |= {"attention_mask": run.mask, "position_ids": None, "position_embeddings": run.tables}
        if run.at is None:
            return stock(x, *args, **kwargs)
        out = stock(gather_rows(x, run.at), *args, **kwargs)
        states: Tensor = out[0] if isinstance(out, tuple) else out  # (B, K, D)
        x = x.to(states.device)
        index = flat_index(run.at.to(x.device), x.shape[1])
        whole = x.flatten(0, 1).index_copy(0, index, states.flatten(0, 1).to(x.dtype)).view_as(x)
        if number == self.vlm.decoder.depth - 1:
            whole = _end_with_kept(whole, run)
        return (whole, *out[1:]) if isinstance(out, tuple) else whole

    def _cut(self, cut: Cut, number: int, x: Tensor, tables: tuple[Tensor, Tensor], call: Call, run: DecoderPass) -> Tensor:
        """Applies a step to the tokens of every image: (B, L, D) -> same."""
        if not run.groups:
            return x
        groups = []
        questions = pack_question(x, run.question)
        last = run.question.int().cumsum(1).argmax(1)  # (B,), the last token of the question
        for group in run.groups:
            rows, at = group.rows, group.at

            def attend(x: Tensor = x, rows: Tensor = rows, at: Tensor = at) -> Attention:
                cos, sin = (table.expand(len(x), -1, -1)[rows] for table in tables)
                visible, bias = (run.left & run.real)[rows], None if run.bias is None else run.bias[rows]
                query = torch.maximum(last[rows], at.amax(1))  # the image's last token where no text follows
                return self.vlm.decoder.attention(number, x[rows], (cos, sin), visible, query, at, bias)

            tokens = x[rows[:, None], at]  # (G, N, D)
            keep = self.chooser.tokens_to_keep(cut, at.shape[1] if group.count is None else group.count)
            reduction = self._decide(cut, keep, tokens, group, questions.rows(rows), attend, call)
            if reduction.soft is not None:
                self.vlm.decoder.check_bias()
                x = x if reduction.is_selection else x.index_put((rows[:, None], at), reduction.apply(tokens))
                groups.append(self._weigh_softly(run, group, reduction, reduction.soft.float(), keep))
                continue
            kept = at.gather(1, reduction.index)  # (G, K)
            if not reduction.is_selection:
                x = x.index_put((rows[:, None], kept), reduction.apply(tokens))
            run.left[rows[:, None], at] = False
            run.left[rows[:, None], kept] = True
            if reduction.sizes is not None:
                before = 1.0 if group.sizes is None else group.sizes.gather(1, reduction.index)
                self._add_weight(run, rows, kept, reduction.sizes / before)
            present = None if group.present is None else group.present.gather(1, reduction.index)
            count = group.count if reduction.k == reduction.n else None
            groups.append(replace(group, at=kept, sizes=reduction.sizes_after(group.sizes), present=present, count=count))
        run.groups = groups
        return x

    def _weigh_softly(self, run: DecoderPass, group: ImageGroup, reduction: Reduction, soft: Tensor, keep: int) -> ImageGroup:
        """Gives every token of a group the attention weight of its probability soft (G, N); the group behind this cut."""
        factor, sizes = soft.clamp_min(MIN_KEEP_PROBABILITY), group.sizes
        if reduction.sizes is not None:  # tokens were merged
            factor, sizes = factor * reduction.sizes / (1.0 if sizes is None else sizes), reduction.sizes
        self._add_weight(run, group.rows, group.at, factor)
        return replace(group, sizes=sizes, present=soft if group.present is None else soft * group.present, count=keep)

    def _decide(
        self,
        cut: Cut,
        keep: int,
        tokens: Tensor,
        group: ImageGroup,
        question: Question,
        attend: Callable[[], Attention],
        call: Call,
    ) -> Reduction:
        """The decision of a step about the vision tokens (G, N, D) of a group of images."""
        assert call.tower is not None  # set when the features were computed
        state, n = call.tower, tokens.shape[1]
        if keep == (n if group.count is None else group.count):
            everything = Reduction(torch.arange(n, device=tokens.device).expand(len(tokens), -1), n)
            state.record_decoder_cut(cut, everything, group.images)
            return everything
        h, w = state.grid or (0, 0)
        with torch.autocast(tokens.device.type, enabled=False):
            view = View(
                tokens=tokens,
                prefix=tokens[:, :0],
                grid=(h, w) if h * w == n and not state.stages else None,
                attention=attend() if "attention" in cut.step.method.needs else None,
                sizes=group.sizes,
                samples=state.samples.to(group.images.device)[group.images],
                seed=cut.seed,
                context=call.context,
                part=self.chooser.part(cut.step, tokens.device),
                place=cut.name,
                question=question,
                present=group.present,
            )
            reduction = self.chooser.choose(cut, view, keep, group.images)
        state.record_decoder_cut(cut, reduction, group.images)
        return reduction

    def _start_stage(self, number: int, x: Tensor, cache: Any, run: DecoderPass) -> None:
        """Sets the tokens that the layers from this one on get, and what they may attend to."""
        alive, bias = run.left & run.real, run.bias
        most = int(alive.sum(1).amax())
        if most < x.shape[1]:
            order = (~alive).int().argsort(dim=1, stable=True)[:, :most]  # tokens that are left, then fillers
            run.at = order.sort(dim=1).values  # (B, K)
            alive = alive.gather(1, run.at)
            bias = None if bias is None else bias.gather(1, run.at)
        stage = Stage(alive, bias)
        if cache is not None:
            stage = self._update_cache(cache, number, stage, run)
        run.mask = self.vlm.decoder.mask(stage.alive, alive.shape[1], stage.bias, x.dtype)

    def _update_cache(self, cache: Any, number: int, new: Stage, run: DecoderPass) -> Stage:
        """Records the new tokens of the layers from this one on in the cache; returns all its tokens."""
        past, record = cached_length(cache, number), cache_record(cache)
        if record is None:
            record = CacheRecord(self.plan, past)
            cache.__class__ = pruned_cache_class(type(cache))  # type: ignore[arg-type]
            cache.tokensieve_record = record
        if number == self.first:
            record.n_tokens_fed += run.real.shape[1]
        if past:
            earlier = new.alive.new_ones((len(new.alive), past)) if run.past is None else run.past
            before = record.stages.get(number, Stage(earlier))
            if before.alive.shape[1] < past or len(before.alive) != len(new.alive):
                raise UserError(
                    f"the cache of layer {number} holds {past} tokens of {len(new.alive)} prompts, but {before.alive.shape[1]} "
                    f"tokens of {len(before.alive)} prompts were written under this plan; pass the cache unchanged, or none"
                )
            new = before.first(past).then(new)  # fewer if the cache was cropped
        record.stages[number] = new
        return new


def _end_with_kept(x: Tensor, run: DecoderPass) -> Tensor:
    """The states (B, L, D) with that of the last token of each prompt from the last one that is left, if it was dropped."""
    real, left = run.real.to(x.device), (run.left & run.real).to(x.device)
    end, kept = (there.int().cumsum(1).argmax(1) for there in (real, left))  # (B,)
    if torch.equal(end, kept):
        return x
    rows = torch.arange(len(x), device=x.device)
    return x.index_put((rows, end), x[rows, kept])
