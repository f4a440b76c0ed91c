"""Decoder layers behind a cut: they run on the tokens that are left, and the key/value cache records which those are.

At a cut the tokens that are left are gathered, and the layers up to the next cut get them alone. After the last layer their
states are written back to their positions, so that the final norm, the head and the loss see the original length; a dropped
token keeps its last state. Layers whose states are read (all, if hidden states are recorded or a layer has a hook; the first
ones, to which Qwen3-VL adds deep features) return all tokens. If the last token of a prompt was dropped, because the prompt
ends with an image, it gets the output of the last one that is left. Position ids are the original ones.

The cache of a layer holds only the tokens that the layer processed. Which of its entries may be attended to is recorded on the
cache itself, so that generation can continue from it: step by step, in batches with padding, with beams, from a copy of the
cache, or after it was cropped.

Merged tokens keep their sizes in the decoder: log(size) is added to the attention logits of their keys, so that a token
merged from five patches gets the attention weight of five. Flash attention supports no bias; there every token counts once.

With a soft reduction nothing is dropped: log(soft) is added to the attention logits of the keys from this layer on. Where soft
is 0 or 1, this equals dropping. Later cuts know the probability that a token is still there, and count by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokensieve.core import Inputs, Question, Reduction, Rotary, View
from tokensieve.cutting.allotment import image_budgets
from tokensieve.cutting.cache import CacheRecord, Stage, attended_length, cache_record, cached_length, pruned_cache_class
from tokensieve.cutting.choice import Chooser
from tokensieve.cutting.decoder_state import (
    DecoderCall,
    DecoderPass,
    ImageGroup,
    VisionTokens,
    group_images,
    longest,
)
from tokensieve.cutting.passes import Call, Calls, check_sample_count
from tokensieve.cutting.placement import Cut
from tokensieve.errors import UserError
from tokensieve.models.decoder import Projected
from tokensieve.models.patching import capture_calls
from tokensieve.models.sight import LayerKind, Sight
from tokensieve.models.vlm import Vlm
from tokensieve.scoring import Attention, gather_rows

MIN_KEEP_PROBABILITY = torch.finfo(torch.float32).tiny  # the smallest probability whose logarithm is taken


class DecoderLayers:
    """The cuts of a plan in the layers of a decoder.

    cuts: by layer; layer 0 is always included if the tower is cut, with or without a cut of its own.
    """

    def __init__(self, vlm: Vlm, cuts: Mapping[int, list[Cut]], chooser: Chooser, calls: Calls, plan: str) -> None:
        self.vlm, self.cuts, self.chooser, self.calls, self.plan = vlm, cuts, chooser, calls, plan
        self.first = min(cuts, default=vlm.decoder.depth)  # the first layer behind a cut; the depth where there is none
        self.recorded = {number - 1 for number in cuts if any(map(asks_previous, cuts[number]))}  # layers whose q, k are kept

    @property
    def patched(self) -> range:
        """The layers whose forward is replaced: those behind a cut, and the one before it if a cut asks for its attention."""
        return range(self.first - (self.first - 1 in self.recorded), self.vlm.decoder.depth)

    def run_decoder(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The decoder's forward: one pass over its layers."""
        call = self.calls.current
        state = call.decoder
        outer, run = state.run, self._start_pass(call, args, kwargs)
        state.run = run
        try:
            out = stock(*args, **kwargs)
        except Exception:
            if run is not None and run.whole is not None and not run.is_in_layer:  # somebody else got the tokens that are left
                self._check_order(run, run.next_layer + 1)
            raise
        finally:
            state.run = outer
        if run is not None:
            self._check_order(run, run.last + 1)
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
        state, decoder = call.decoder, self.vlm.decoder
        masks, state.image_masks = state.image_masks, {}
        given, state.arguments = kwargs if state.arguments is None else state.arguments, None
        cache = kwargs.get("past_key_values")
        record = cache_record(cache)
        x = kwargs.get("inputs_embeds")
        if x is None:  # the decoder was called directly, with text only
            x = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        batch, length = x.shape[:2]
        if not masks and record is None:
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
        n_before = cached_length(cache, 0) if record is None else record.n_tokens_fed
        decoder.check(length + n_before)
        run = DecoderPass((batch, length), x.device, n_before=n_before)
        run.last = min(decoder.depth, int(decoder.module.config.num_hidden_layers)) - 1
        run.layers_read = decoder.layers_read(kwargs)
        run.past, run.real = _split_mask(given.get("attention_mask"), n_before, length, x.device)
        if run.real is not None and self._is_without_padding(run.real, state):
            run.real = None
        run.blocks = None if self.vlm.blocks is None else self.vlm.blocks(given, length)
        if masks:
            self._add_images(run, masks, call)
            if any("inputs" in cut.step.method.needs for cuts in self.cuts.values() for cut in cuts):
                run.embeds = x
        return run

    def _is_without_padding(self, real: Tensor, state: DecoderCall) -> bool:
        """Whether all new tokens (B, L) are real. generate() feeds single tokens that are: no need to look at them."""
        in_generate = state.prompt_length is not None and real.shape[1] == 1
        return in_generate or bool(real.all())

    def _add_images(self, run: DecoderPass, masks: Mapping[str, Tensor], call: Call) -> None:
        """Adds the vision tokens to a pass. masks: by medium, (B, L), the placeholders."""
        state = call.decoder
        state.are_used = True
        if call.samples is not None and call.tower is not None:
            check_sample_count(call.samples, len(call.tower.samples))
        groups = [group for medium, mask in masks.items() for group in group_images(mask, state.features[medium])]
        image_mask = torch.stack([*masks.values()]).any(0)  # (B, L)
        real = torch.ones_like(image_mask) if run.real is None else run.real
        others, inside = ~image_mask, image_mask.clone()
        for group in groups:
            if group.stays is not None:
                others[group.rows[:, None], group.stays] = True
            inside |= _between(group, image_mask.shape)
        left = others.clone()
        for group in groups:
            left[group.rows[:, None], group.at] = True
        question = state.question_mask(call.context, real, inside)
        ends = real.int().cumsum(1).argmax(1)[:, None]  # (B, 1), the last token of each prompt
        run.images = VisionTokens(
            groups,
            left,
            question,
            n_question=longest(question),
            n_others=(real & others).sum(1).tolist(),
            end_with_image=bool(image_mask.gather(1, ends).any()),
        )
        for group in groups:
            if group.sizes is not None:
                self._add_weight(run, group.rows, group.at, group.sizes)

    def _add_weight(self, run: DecoderPass, rows: Tensor, at: Tensor, factor: Tensor) -> None:
        """Multiplies the attention weight of the tokens at (G, N) of these rows by factor (G, N), if the kernel can."""
        if not self.vlm.decoder.takes_bias:
            return
        bias = torch.zeros(run.shape, device=at.device) if run.bias is None else run.bias
        run.bias = bias.index_put((rows[:, None], at), factor.float().log(), accumulate=True)

    def run_layer(self, number: int, stock: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """A layer's forward. hidden_states: (B, L, D), or (B, K, D) behind a cut."""
        call, x = self.calls.current, hidden_states
        run = call.decoder.run
        if run is None:
            return stock(x, *args, **kwargs)
        self._check_order(run, number)
        if run.device != x.device:
            run.to(x.device)
        if number < self.first:
            return self._run_stock(number, stock, x, args, kwargs, run)
        if number in self.cuts:
            x = self._start_stage(number, run.restore(x), kwargs, call, run)
        elif run.whole is None:  # the layer before returned all tokens
            x = run.shorten(x)
        kwargs |= {"attention_mask": self._mask(number, x, kwargs, run), "position_ids": None}
        kwargs["position_embeddings"] = self._tables(number, kwargs["position_embeddings"], len(x), run)
        run.is_in_layer = True
        out = self._run_stock(number, stock, x, args, kwargs, run)
        run.is_in_layer = False
        if run.at is None or not (number < run.layers_read or number == run.last):
            return out
        whole = run.restore(out[0] if isinstance(out, tuple) else out)
        if number == run.last:
            whole = _end_with_kept(whole, run)
        return (whole, *out[1:]) if isinstance(out, tuple) else whole

    def _run_stock(
        self, number: int, stock: Callable[..., Any], x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], run: DecoderPass
    ) -> Any:
        """Runs the stock layer, and keeps its queries and keys if a cut before the next layer asks for them."""
        if run.images is None or number not in self.recorded:
            return stock(x, *args, **kwargs)
        attn = self.vlm.decoder.layers[number].self_attn
        with capture_calls(attn.q_proj) as q, capture_calls(attn.k_proj) as k:
            out = stock(x, *args, **kwargs)
        run.projected = Projected(q[-1].output, k[-1].output, *kwargs["position_embeddings"])
        return out

    def _start_stage(self, number: int, x: Tensor, kwargs: dict[str, Any], call: Call, run: DecoderPass) -> Tensor:
        """Cuts before a layer, and sets what the layers from it on get: (B, L, D) -> (B, K, D)."""
        tables: tuple[Tensor, Tensor] = kwargs["position_embeddings"]
        if run.images is not None:
            for cut in self.cuts[number]:
                x = self._cut(cut, number, x, tables, call, run, run.images)
            run.projected = None
        stage = self._find_tokens(run)
        if run.images is not None:
            run.tables.clear()
        if (cache := kwargs.get("past_key_values")) is not None:
            stage = self._update_cache(cache, number, stage, run)
        run.stage = stage
        run.masks.clear()
        return run.shorten(x)

    def _mask(self, number: int, x: Tensor, kwargs: Mapping[str, Any], run: DecoderPass) -> Tensor | None:
        """The mask of a layer for the tokens x (B, K, D) that it gets; layers of one kind share it."""
        kind, n_new = self.vlm.decoder.kinds[number], x.shape[1]
        if kind not in run.masks:
            assert run.stage is not None
            cache = kwargs.get("past_key_values")
            stage = run.stage if cache is None else run.stage.last(attended_length(cache, number, n_new))
            blocks = run.blocks if run.blocks is None or run.at is None else run.blocks.gather(1, run.at)
            if blocks is not None:  # those of earlier passes are behind no new token
                blocks = torch.nn.functional.pad(blocks, (stage.shape[1] - n_new, 0), value=-1)
            sight = self._sight(kind, stage.shape, stage.alive, stage.at, blocks, run)
            run.masks[kind] = self.vlm.decoder.mask(sight, n_new, stage.bias, x)
        return run.masks[kind]

    def _sight(
        self,
        kind: LayerKind,
        shape: tuple[int, int],
        alive: Tensor | None,
        at: Tensor | None,
        blocks: Tensor | None,
        run: DecoderPass,
    ) -> Sight:
        """What tokens see in layers of this kind. A window counts only where a sequence is longer."""
        window = kind.window if kind.window is not None and run.n_before + run.shape[1] > kind.window else None
        return Sight(shape, alive, None if window is None else at, blocks, window, self.vlm.blocks_pass_window)

    def _tables(self, number: int, tables: tuple[Tensor, ...], rows: int, run: DecoderPass) -> tuple[Tensor, ...]:
        """The rotary tables of the tokens that a layer gets, from those of all; layers of one kind share them."""
        kind, at = self.vlm.decoder.kinds[number], run.at
        if kind not in run.tables:
            run.tables[kind] = tables if at is None else tuple(gather_rows(t.expand(rows, -1, -1), at) for t in tables)
        return run.tables[kind]

    def _find_tokens(self, run: DecoderPass) -> Stage:
        """Sets the tokens that the next layers get: those that are left, with fillers in rows that have fewer of them."""
        if run.images is None:
            return Stage(run.shape, run.real, run.bias, self._indices(run))
        counts = run.images.counts()
        most = max(counts, default=run.shape[1])
        has_fillers = any(count < most for count in counts)
        alive, bias = run.images.left if run.real is None else run.images.left & run.real, run.bias
        if most < run.shape[1]:
            order = (~alive).int().argsort(dim=1, stable=True)[:, :most]  # tokens that are left, then fillers
            run.at = order.sort(dim=1).values if has_fillers else order  # (B, K)
            alive = alive.gather(1, run.at)
            bias = None if bias is None else bias.gather(1, run.at)
        return Stage((run.shape[0], most), alive if has_fillers else None, bias, self._indices(run))

    def _indices(self, run: DecoderPass) -> Tensor | None:
        """The indices of the tokens that the layers get in the whole sequence, (B, K); None: no layer has a window."""
        if not self.vlm.decoder.has_windows:
            return None
        at = torch.arange(run.shape[1], device=run.device).expand(run.shape) if run.at is None else run.at
        return at + run.n_before

    def _cut(
        self,
        cut: Cut,
        number: int,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        call: Call,
        run: DecoderPass,
        images: VisionTokens,
    ) -> Tensor:
        """Applies a step to the tokens of every image: (B, L, D) -> same."""
        groups = []
        asks = {"question", "text"} & set(cut.step.method.needs)
        questions = images.question_of(x) if asks else None
        for own, group in share_by_prompts(cut, self.chooser, images.groups):
            rows, at = group.rows, group.at

            def attend(x: Tensor = x, rows: Tensor = rows, at: Tensor = at) -> Attention:
                return self._attention(number, asks_previous(cut), x, tables, run, images, rows, at)

            tokens = gather_rows(x if len(x) == 1 == len(rows) else x.index_select(0, rows), at)  # (G, N, D)
            n_now = group.n_now
            keep = self.chooser.tokens_to_keep(own, n_now, group.first)
            question = None if questions is None else questions.rows(rows)
            rotary = self._rotary(images, group, tables, len(x)) if "rotary" in cut.step.method.needs else None
            inputs = self._inputs(run, images, group)
            reduction = self._decide(own, keep, tokens, group, question, attend, call, inputs, rotary)
            if reduction.soft is not None:
                self.vlm.decoder.check_bias()
                x = x if reduction.is_selection else x.index_put((rows[:, None], at), reduction.apply(tokens))
                groups.append(self._weigh_softly(run, group, reduction, reduction.soft.float(), keep))
                continue
            if reduction.k < reduction.n or reduction.counts is not None:
                images.left[rows[:, None], at] = False
            for behind, made, factor in _groups_behind(cut, group, reduction, tokens):
                if made is not None:
                    x = x.index_put((behind.rows[:, None], behind.at), made)
                images.left[behind.rows[:, None], behind.at] = True
                if factor is not None:
                    self._add_weight(run, behind.rows, behind.at, factor)
                groups.append(behind)
        images.groups = groups
        return x

    def _inputs(self, run: DecoderPass, images: VisionTokens, group: ImageGroup) -> Inputs | None:
        """The decoder's input for the images of a group, if a method asks for it."""
        if run.embeds is None or group.entered is None:
            return None
        question = images.question_of(run.embeds)
        return Inputs(gather_rows(run.embeds.index_select(0, group.rows), group.entered), question.rows(group.rows))

    def _rotary(self, images: VisionTokens, group: ImageGroup, tables: tuple[Tensor, Tensor], batch: int) -> Rotary:
        """The rotary tables (1 or B, L, d) of the vision tokens of a group and of its questions."""
        words = images.question_positions()[0].to(group.at.device)[group.rows]  # (G, T)
        cos, sin = (table.expand(batch, -1, -1).index_select(0, group.rows) for table in tables)
        return Rotary(
            (gather_rows(cos, group.at), gather_rows(sin, group.at)), (gather_rows(cos, words), gather_rows(sin, words))
        )

    def _attention(
        self,
        number: int,
        of_previous: bool,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        run: DecoderPass,
        images: VisionTokens,
        rows: Tensor,
        at: Tensor,
    ) -> Attention:
        """The attention of a layer, or of the one that just ran, among the vision tokens at (G, N) of these rows."""
        visible, bias = images.left if run.real is None else images.left & run.real, run.bias
        last = torch.maximum(images.last_of_question()[rows], at.amax(1))  # the image's last token where no text follows
        source: Tensor | Projected = x[rows]
        blocks, index, cos, sin = run.blocks, None, *tables
        if of_previous:  # of the tokens that the layers before this cut got
            assert run.projected is not None
            cos, sin = run.projected.cos, run.projected.sin
            number -= 1
            if run.at is not None:
                visible, index = visible.gather(1, run.at), run.at[rows]
                bias = None if bias is None else bias.gather(1, run.at)
                blocks = None if blocks is None else blocks.gather(1, run.at)
                last, at = (run.short_positions(each, rows) for each in (last[:, None], at))
                last = last[:, 0]
        cos, sin = (table.expand(len(x), -1, -1)[rows] for table in (cos, sin))
        if of_previous and run.projected is not None:
            source = Projected(run.projected.q[rows], run.projected.k[rows], cos, sin)
        bias, length = None if bias is None else bias[rows], cos.shape[1]
        kind = self.vlm.decoder.kinds[number]
        sight = self._sight(kind, (len(rows), length), visible[rows], index, None if blocks is None else blocks[rows], run)

        def find_question() -> tuple[Tensor, Tensor]:
            words, mask = (each.to(rows.device)[rows] for each in images.question_positions())  # (G, T)
            if of_previous:
                words = run.short_positions(words, rows).clamp_max(length - 1)
            return words, mask

        return self.vlm.decoder.attention(number, source, (cos, sin), sight, last, at, bias, find_question)

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
        question: Question | None,
        attend: Callable[[], Attention],
        call: Call,
        inputs: Inputs | None = None,
        rotary: Rotary | None = None,
    ) -> Reduction:
        """The decision of a step about the vision tokens (G, N, D) of a group of images."""
        assert call.tower is not None  # set when the features were computed
        state, n = call.tower, tokens.shape[1]
        if keep == group.n_now and not cut.step.method.adaptive:
            everything = Reduction(torch.arange(n, device=tokens.device).expand(len(tokens), -1), n)
            state.record_decoder_cut(cut, everything, group.numbers)
            return everything
        with torch.autocast(tokens.device.type, enabled=False):
            view = View(
                tokens=tokens,
                prefix=tokens[:, :0],
                grid=group.grid,
                attention=attend() if "attention" in cut.step.method.needs else None,
                sizes=group.sizes,
                samples=state.samples[group.numbers].to(tokens.device),
                seed=cut.seed,
                context=call.context,
                part=self.chooser.part(cut.step, tokens.device),
                place=cut.name,
                question=question,
                present=group.present,
                layer=cut.layer,
                depth=self.vlm.decoder.depth,
                inputs=inputs,
                rotary=rotary,
                carried=group.carried.get(str(cut.step)),
                final_norm=getattr(self.vlm.decoder.module, "norm", None),
                frames=group.frames,
                share=cut.share,
            )
            reduction = self.chooser.choose(cut, view, keep, group.numbers)
        state.record_decoder_cut(cut, reduction, group.numbers)
        return reduction

    def _update_cache(self, cache: Any, number: int, new: Stage, run: DecoderPass) -> Stage:
        """Records the new tokens of the layers from this one on in the cache; returns all its tokens."""
        past, record, rows = cached_length(cache, number), cache_record(cache), new.shape[0]
        if record is None:
            record = CacheRecord(self.plan, past)
            cache.__class__ = pruned_cache_class(type(cache))  # type: ignore[arg-type]
            cache.tokensieve_record = record
        if number == self.first:
            record.n_tokens_fed += run.shape[1]
        if past:
            before = record.stages.get(number) or Stage((rows, past), run.past)
            if before.shape[1] < past or before.shape[0] != rows:
                raise UserError(
                    f"the cache of layer {number} holds {past} tokens of {rows} prompts, but {before.shape[1]} tokens of "
                    f"{before.shape[0]} prompts were written under this plan; pass the cache unchanged, or none"
                )
            new = before.first(past).then(new)  # fewer if the cache was cropped
        record.stages[number] = new
        return new


def _groups_behind(
    cut: Cut, group: ImageGroup, reduction: Reduction, tokens: Tensor
) -> Iterator[tuple[ImageGroup, Tensor | None, Tensor | None]]:
    """What a cut leaves of a group of images: groups of images with the same number of tokens. With each, its new tokens
    (G, K, D), None where they are unchanged; and the factor (G, K) of their attention weights, None where it is 1."""
    made = None if reduction.is_selection else reduction.apply(tokens)
    factor = None
    if reduction.sizes is not None and reduction.prop_attn:
        factor = reduction.sizes / (1.0 if group.sizes is None else group.sizes.gather(1, reduction.index))
    carried = group.carried if reduction.carry is None else group.carried | {str(cut.step): reduction.carry}
    behind = replace(
        group,
        at=group.at.gather(1, reduction.index),
        sizes=reduction.sizes_after(group.sizes),
        present=None if group.present is None else group.present.gather(1, reduction.index),
        count=group.count if reduction.k == reduction.n else None,
        grid=group.grid if reduction.k == reduction.n and reduction.is_selection else None,
        frames=None if group.frames is None else group.frames.gather(1, reduction.index),
        carried={name: values.gather(1, reduction.index) for name, values in carried.items()},
    )
    if reduction.counts is None:
        yield behind, made, factor
        return
    counts: list[int] = reduction.counts.tolist()
    for count in sorted(set(counts)):
        picked = [i for i, each in enumerate(counts) if each == count]
        new, weights = (None if each is None else each[picked, :count] for each in (made, factor))
        if weights is not None and bool((weights == 1).all()):  # sizes that only told the padding: no mask is needed
            weights = None
        yield behind.select(picked, count), new, weights


def _between(group: ImageGroup, shape: torch.Size) -> Tensor:
    """What stands from the first to the last token of an image, (B, L): line ends, timestamps of frames."""
    order, inside = torch.arange(shape[1], device=group.at.device), torch.zeros(shape, dtype=torch.bool, device=group.at.device)
    spans = (order >= group.at.amin(1, keepdim=True)) & (order <= group.at.amax(1, keepdim=True))  # (G, L)
    for row, span in zip(group.sequences, spans, strict=True):
        inside[row] |= span
    return inside


def share_by_prompts(cut: Cut, chooser: Chooser, groups: Sequence[ImageGroup]) -> Iterator[tuple[Cut, ImageGroup]]:
    """The groups of images, each with its cut; a budget of the whole prompt is shared by the images in it."""
    if cut.budget.scope != "prompt":
        yield from ((cut, group) for group in groups)
        return
    members = [(group, i) for group in groups for i in range(len(group.sequences))]
    rows = [group.sequences[i] for group, i in members]
    counts, firsts = [group.n_now for group, _ in members], [group.first for group, _ in members]
    alike: dict[tuple[int, int], list[int]] = {}
    for (group, i), keep in zip(members, image_budgets(cut, chooser, counts, firsts, rows), strict=True):
        alike.setdefault((id(group), keep), []).append(i)
    of_id = {id(group): group for group in groups}
    for (number, keep), picked in alike.items():
        yield cut.with_allotted(keep), of_id[number].of_images(picked)


def asks_previous(cut: Cut) -> bool:
    """Whether a cut uses the attention of the layer that just ran, not of the one to come."""
    return bool(cut.step.options.get("attention") == "previous")


def _split_mask(mask: Any, n_before: int, length: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The attention mask of a call for the cached tokens (B, P) and for the new ones (B, L); None, None if there is none."""
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise UserError(
            "a plan in the decoder needs an attention mask of shape (batch, length), or none: call generate() without a "
            "static cache, and the model without a custom mask"
        )
    if mask.shape[1] != n_before + length:
        raise UserError(
            f"the attention mask is for {mask.shape[1]} tokens, but there are {n_before} cached and {length} new tokens"
        )
    real = mask.to(device, torch.bool)
    return real[:, :n_before], real[:, n_before:]


def _end_with_kept(x: Tensor, run: DecoderPass) -> Tensor:
    """The states (B, L, D) with that of the last token of each prompt from the last one that is left, if it was dropped."""
    if run.images is None or not run.images.end_with_image:
        return x
    left = run.images.left.to(x.device)
    real = torch.ones_like(left) if run.real is None else run.real.to(x.device)
    end, kept = (there.int().cumsum(1).argmax(1) for there in (real, left & real))  # (B,)
    rows = torch.arange(len(x), device=x.device)
    return x.index_put((rows, end), x[rows, kept])
