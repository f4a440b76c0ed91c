"""A plan inside a language decoder: the layers behind a cut run on fewer tokens, everything around them on all of them.

Each layer gets the tokens that are left, and its output is put back to their positions. So the model around the layers (deep
features, final norm, head, loss) sees the length it knows; a dropped token keeps the state it had. Position ids stay the
original ones. The cache of a layer holds only what the layer has seen. Which of its entries may be attended to is recorded on
the cache itself, so that generation goes on from it: step by step, in batches with padding, with beams, from a copy of the
cache, or after it was cropped.

Merged tokens carry their sizes into the decoder: log(size) is added to the attention logits of their keys, so that a token
merged from five patches gets the attention weight of five. Flash attention takes no bias; there every token counts once.

With a soft reduction nothing is dropped: log(soft) is added to the attention logits of the keys from this layer on. That is
dropping where soft is 0 or 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokensieve.core import Question, Reduction, View
from tokensieve.cutting.cache import CacheRecord, Stage, cache_record, cached_length, pruned_cache_class
from tokensieve.cutting.choice import Chooser
from tokensieve.cutting.passes import Call, Calls, Pass
from tokensieve.cutting.placement import Cut
from tokensieve.cutting.tower import TowerCuts
from tokensieve.errors import UserError
from tokensieve.models.patching import is_patched
from tokensieve.models.patching import replace as replace_method
from tokensieve.models.tower import Undo
from tokensieve.models.vlm import Vlm
from tokensieve.scoring import Attention

MIN_KEEP_PROBABILITY = torch.finfo(torch.float32).tiny  # the smallest probability of staying whose logarithm is taken


@dataclass
class ImageFeatures:
    """The images whose features were computed last in a call."""

    lengths: list[int]  # tokens of each image, as placeholders in the sequence count them
    total: float  # the sum of their features, by which they are recognised
    kept: Tensor | None = None  # (I, K), which of them the tower left, in raster order; None: all
    sizes: Tensor | None = None  # (I, K), patches that each of those stands for; None: one each


@dataclass
class Group:
    """Images of a pass that have equally many tokens left."""

    images: Tensor  # (G,), indices of the images of ImageFeatures
    rows: Tensor  # (G,), the sequences they stand in
    at: Tensor  # (G, N), the positions of their tokens in it
    sizes: Tensor | None = None  # (G, N), patches that each token stands for


@dataclass
class DecoderPass:
    """One forward pass of the decoder."""

    past: Tensor | None  # (B, P), False where the tokens before these are padding; None: none is
    real: Tensor  # (B, L), False where the new tokens are padding
    question: Tensor  # (B, L)
    groups: list[Group]
    left: Tensor  # (B, L), which of the new tokens have not been dropped
    bias: Tensor | None = None  # (B, L), log of sizes and of soft masks so far
    at: Tensor | None = None  # (B, K), positions of the tokens that are left; None: all are
    mask: Tensor | None = None  # as the layers of this stage want it
    tables: tuple[Tensor, ...] = ()  # (B, K, d), rotary angles of the tokens that are left

    def to(self, device: torch.device) -> None:
        """Moves everything to the device of the next layer, where a model is spread over several devices."""
        for holder in (self, *self.groups):
            for name, value in vars(holder).items():
                if isinstance(value, Tensor):
                    setattr(holder, name, value.to(device))
        self.tables = tuple(table.to(device) for table in self.tables)


@dataclass
class Prompt:
    """The text of a call."""

    ids: Tensor | None  # (B, L)
    attention_mask: Tensor | None  # (B, L)


@dataclass
class DecoderCall:
    """What one call of a vision-language model has done so far."""

    features: ImageFeatures | None = None
    prompt: Prompt | None = None
    prompt_length: int | None = None  # tokens of the prompt, inside generate()
    labels: Tensor | None = None  # (B, L): tokens with a label are the answer, not the question
    image_mask: Tensor | None = None  # (B, L), placeholders of the pass to come
    run: DecoderPass | None = None  # the pass under way
    expects_step: bool = False  # generate() has prepared the inputs of its next step


class DecoderCuts:
    """The cuts of a plan in the decoder of a vision-language model, and what hands it the tower's tokens.

    cuts: by layer; layer 0 is there, perhaps without a cut, if the tower is cut. tower: its cuts, where it has any.
    """

    def __init__(
        self, vlm: Vlm, cuts: Mapping[int, list[Cut]], tower: TowerCuts | None, chooser: Chooser, calls: Calls, plan: str
    ) -> None:
        self.vlm, self.cuts, self.tower, self.chooser, self.calls, self.plan = vlm, cuts, tower, chooser, calls, plan

    # --- on and off ---------------------------------------------------------------------------------------------

    @property
    def has_plan(self) -> bool:
        """Whether a plan is on the model."""
        return is_patched(self.vlm.inner, "get_image_features")

    def attach(self) -> list[Undo]:
        """Puts the cuts on the model, to be undone by the list in reverse."""
        model, inner, decoder = self.vlm.model, self.vlm.inner, self.vlm.decoder
        undo = [
            self._patch(inner, "get_image_features", self._get_image_features),
            self._patch(inner, "get_placeholder_mask", self._get_placeholder_mask),
            self._patch(decoder.module, "forward", self._run_decoder),
            self._patch(inner, "forward", self._run_inner),
        ]
        if model is not inner:
            undo.append(self._patch(model, "forward", self._run_model))
        if hasattr(model, "generate"):
            undo.append(self._patch(model, "prepare_inputs_for_generation", self._prepare_step))
            undo.append(self._patch(model, "generate", self._generate))
        for number in range(min(self.cuts, default=decoder.depth), decoder.depth):
            undo.append(self._patch(decoder.layers[number], "forward", functools.partial(self._run_layer, number)))
        return undo

    def _patch(self, owner: Any, name: str, planned: Callable[..., Any]) -> Undo:
        """Has planned(stock, *args, **kwargs) called instead of a method, and observed."""
        method = getattr(owner, name)

        def stock(*args: Any, **kwargs: Any) -> Any:
            with self.chooser.model_work():
                return method(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.chooser.plan_work():
                return planned(stock, *args, **kwargs)

        return replace_method(owner, name, call)

    # --- around the decoder -------------------------------------------------------------------------------------

    def _generate(self, stock: Callable[..., Any], inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """generate() is one call: it may compute features before its first step, when no prompt would be known."""
        ids = kwargs.get("input_ids", inputs)
        call = self._new_call()
        state = _decoder_call(call)
        state.prompt, state.prompt_length = Prompt(ids, kwargs.get("attention_mask")), None if ids is None else ids.shape[1]
        return self.calls.run(call, stock, inputs, *args, **kwargs)

    def _prepare_step(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """generate() prepares each of its steps: the forward that comes next belongs to it, others do not."""
        if self.calls.is_open:
            call, state = self.calls.current, _decoder_call(self.calls.current)
            if state.prompt is not None and state.run is None:
                state.expects_step = True
                call.entered.clear()
        return stock(*args, **kwargs)

    def _run_model(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call, run = self._join(lambda call, state: state.expects_step)
        state = _decoder_call(call)
        state.expects_step, state.labels = False, kwargs.get("labels")
        return run(stock, *args, **kwargs)

    def _run_inner(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = (id(self.vlm.inner), "forward")
        call, run = self._join(lambda call, state: key not in call.entered and state.run is None)
        call.entered.add(key)
        state = _decoder_call(call)
        if state.prompt_length is None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            state.prompt = Prompt(ids, kwargs.get("attention_mask"))
        state.image_mask = None
        return run(stock, *args, **kwargs)

    def _join(self, belongs: Callable[[Call, DecoderCall], bool]) -> tuple[Call, Callable[..., Any]]:
        """The call under way where this belongs to it, else a new one; and what runs a function in it."""
        if self.calls.is_open and belongs(self.calls.current, _decoder_call(self.calls.current)):
            return self.calls.current, _run_directly
        call = self._new_call()
        return call, functools.partial(self.calls.run, call)

    def _new_call(self) -> Call:
        """A call that knows the features which this thread computed last, since a caller may hand them in."""
        latest, call = self.calls.latest, self.calls.new_call()
        call.decoder = DecoderCall()
        if latest is not None and latest.decoder is not None:
            call.decoder.features, call.tower = latest.decoder.features, latest.tower
        return call

    def _get_image_features(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call, run = self._join(lambda call, state: state.run is None)
        return run(self._compute_features, call, stock, *args, **kwargs)

    def _compute_features(self, call: Call, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The features of images, each at its position among all patches; what the tower removed is zeros."""
        out = stock(*args, **kwargs)
        features: Sequence[Tensor] = out.pooler_output
        left = self._left_by_tower(call, len(features), features[0].device)
        lengths, kept, sizes = [len(feature) for feature in features], None, None
        if left is not None:
            kept, sizes, n = left
            stacked = torch.stack(tuple(features))  # (I, K, E)
            full = stacked.new_zeros((stacked.shape[0], n, stacked.shape[2]))
            out.pooler_output = list(full.scatter(1, kept[..., None].expand_as(stacked), stacked))
            kept, order = kept.sort(dim=1)
            lengths, sizes = [n] * len(features), None if sizes is None else sizes.gather(1, order)
        total = float(torch.cat(tuple(features)).detach().sum(dtype=torch.float64))
        _decoder_call(call).features = ImageFeatures(lengths, total, kept, sizes)
        return out

    def _left_by_tower(self, call: Call, images: int, device: torch.device) -> tuple[Tensor, Tensor | None, int] | None:
        """Which patches the tower left of the images that it just saw, their sizes, and how many there were; None: all."""
        if self.tower is None or not self.tower.cuts:  # the tower is the stock one and started no pass
            ids = self.calls.number_samples(images, device) if call.samples is None else call.samples.to(device)
            grid = None if self.vlm.tower is None else self.vlm.tower.grid
            call.tower = Pass(samples=ids, grid=grid, has_full_grid=True)
            return None
        state = call.tower
        assert state is not None
        if state.patch_index is None:
            return None
        if not state.has_full_grid or state.grid is None:
            raise UserError("patches of the images are missing before any cut (patch dropout), so their places are not known")
        h, w = state.grid
        return state.patch_index, state.sizes, h * w

    def _get_placeholder_mask(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = stock(*args, **kwargs)
        features = kwargs.get("image_features", args[2] if len(args) > 2 else None)
        if features is not None:
            state = _decoder_call(self.calls.current)
            _check_features(features, state.features)
            mask = answer[0] if isinstance(answer, tuple) else answer
            state.image_mask = mask[..., 0] if mask.dim() == 3 else mask  # (B, L)
        return answer

    def question_about(self, call: Call, images: int, tokens: int) -> Question | None:
        """What the prompt asks about each of the images whose features are being computed: the decoder's input embeddings.

        tokens: how many placeholders each image has.
        """
        state = _decoder_call(call)
        if state.prompt is None or state.prompt.ids is None:
            return None
        ids, mask = state.prompt.ids, state.prompt.attention_mask
        placeholders = ids == self.vlm.inner.config.image_token_id  # (B, L)
        counts = placeholders.sum(1) // tokens
        if int(counts.sum()) != images:
            raise UserError(f"{images} images, but the prompts have places for {int(counts.sum())}, of {tokens} tokens each")
        real = torch.ones_like(placeholders) if mask is None else mask.to(ids.device, torch.bool)
        question = self._question_mask(call, real[:, -ids.shape[1] :], placeholders)
        embedded = self.vlm.inner.get_input_embeddings()(ids)
        rows = torch.arange(len(ids), device=ids.device).repeat_interleave(counts)
        return _pack_question(embedded, question).rows(rows)

    # --- inside the decoder -------------------------------------------------------------------------------------

    def _run_decoder(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = self.calls.current
        state = _decoder_call(call)
        outer, state.run = state.run, self._start_pass(call, state, args, kwargs)
        try:
            return stock(*args, **kwargs)
        finally:
            state.run = outer

    def _start_pass(self, call: Call, state: DecoderCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DecoderPass | None:
        """The pass for what the decoder is called with; None where there is nothing to cut."""
        image_mask, state.image_mask = state.image_mask, None
        cache = kwargs.get("past_key_values")
        record = cache_record(cache)
        x = kwargs.get("inputs_embeds")
        if x is None:  # text alone, given to the decoder itself
            x = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        batch, length = x.shape[:2]
        if image_mask is None and record is None:
            if length > 1 and not cached_length(cache, 0):
                self.chooser.notes.warn(
                    f"{self.plan}: no image in this prompt, or its features came in a way that is not known: nothing is cut"
                )
            return None
        if record is not None and record.plan != self.plan:
            raise UserError(
                f"this cache was filled under the plan {record.plan}, and {self.plan} is on now; begin without a cache"
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise UserError(
                "a plan in the decoder needs the attention mask as (batch, length), or none: call generate() without a "
                "static cache, and the model without a mask of its own"
            )
        n_before = cached_length(cache, 0) if record is None else record.n_tokens_fed
        if mask is not None and mask.shape[1] != n_before + length:
            raise UserError(f"the attention mask is for {mask.shape[1]} tokens, but {n_before} were fed and {length} come")
        self.vlm.decoder.check(length + n_before)
        past, real = None, torch.ones((batch, length), dtype=torch.bool, device=x.device)
        if mask is not None:
            past, real = mask.to(x.device, torch.bool).split([n_before, length], dim=1)
        if image_mask is None:
            return DecoderPass(past, real, real, [], torch.ones_like(real))
        assert state.features is not None  # by _check_features
        groups = _group_images(image_mask, state.features)
        left = torch.ones_like(real)
        for group in groups:
            left[group.rows] &= ~image_mask[group.rows]
        for group in groups:
            left[group.rows[:, None], group.at] = True
        run = DecoderPass(past, real, self._question_mask(call, real, image_mask), groups, left)
        for group in groups:
            if group.sizes is not None:
                self._add_weight(run, group.rows, group.at, group.sizes)
        return run

    def _add_weight(self, run: DecoderPass, rows: Tensor, at: Tensor, factor: Tensor) -> None:
        """The tokens at (G, N) of these rows get `factor` (G, N) times the attention weight, where the kernel takes a bias."""
        if not self.vlm.decoder.takes_bias:
            return
        bias = torch.zeros(run.real.shape, device=at.device) if run.bias is None else run.bias
        run.bias = bias.index_put((rows[:, None], at), factor.float().log(), accumulate=True)

    def _run_layer(self, number: int, stock: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        call, x = self.calls.current, hidden_states  # (B, L, D)
        run = _decoder_call(call).run
        if run is None:
            return stock(x, *args, **kwargs)
        if run.left.device != x.device:
            run.to(x.device)
        tables: tuple[Tensor, Tensor] = kwargs["position_embeddings"]
        if number in self.cuts:
            for cut in self.cuts[number]:
                x = self._cut(cut, number, x, tables, call, run)
            self._start_stage(number, x, kwargs.get("past_key_values"), run)
            run.tables = (
                tables if run.at is None else tuple(_gather_rows(table.expand(len(x), -1, -1), run.at) for table in tables)
            )
        kwargs |= {"attention_mask": run.mask, "position_ids": None, "position_embeddings": run.tables}
        if run.at is None:
            return stock(x, *args, **kwargs)
        out = stock(_gather_rows(x, run.at), *args, **kwargs)
        states: Tensor = out[0] if isinstance(out, tuple) else out  # (B, K, D)
        x = x.to(states.device)
        index = _flat_index(run.at.to(x.device), x.shape[1])
        whole = x.flatten(0, 1).index_copy(0, index, states.flatten(0, 1).to(x.dtype)).view_as(x)
        return (whole, *out[1:]) if isinstance(out, tuple) else whole

    def _cut(self, cut: Cut, number: int, x: Tensor, tables: tuple[Tensor, Tensor], call: Call, run: DecoderPass) -> Tensor:
        """Lets a step decide about every image's tokens and carries the decisions out: (B, L, D) -> same."""
        if not run.groups:
            return x
        groups = []
        questions = _pack_question(x, run.question)
        last = run.question.int().cumsum(1).argmax(1)  # (B,), the last token of the question
        for group in run.groups:
            rows, at = group.rows, group.at

            def attend(x: Tensor = x, rows: Tensor = rows, at: Tensor = at) -> Attention:
                cos, sin = (table.expand(len(x), -1, -1)[rows] for table in tables)
                visible, bias = (run.left & run.real)[rows], None if run.bias is None else run.bias[rows]
                query = torch.maximum(last[rows], at.amax(1))  # where no text follows the image, its last token
                return self.vlm.decoder.attention(number, x[rows], (cos, sin), visible, query, at, bias)

            tokens = x[rows[:, None], at]  # (G, N, D)
            reduction = self._decide(cut, tokens, group, questions.rows(rows), attend, call)
            if reduction.soft is not None:
                if not self.vlm.decoder.takes_bias:
                    raise UserError('a soft mask needs attn_implementation="sdpa" or "eager"; flash attention takes none')
                self._add_weight(run, rows, at, reduction.soft.float().clamp_min(MIN_KEEP_PROBABILITY))
                groups.append(group)
                continue
            kept = at.gather(1, reduction.index)  # (G, K)
            if reduction.weight is not None or reduction.gate is not None:
                x = x.index_put((rows[:, None], kept), reduction.apply(tokens))
            run.left[rows[:, None], at] = False
            run.left[rows[:, None], kept] = True
            if reduction.sizes is not None:
                before = 1.0 if group.sizes is None else group.sizes.gather(1, reduction.index)
                self._add_weight(run, rows, kept, reduction.sizes / before)
            groups.append(replace(group, at=kept, sizes=reduction.sizes_after(group.sizes)))
        run.groups = groups
        return x

    def _decide(
        self, cut: Cut, tokens: Tensor, group: Group, question: Question, attend: Callable[[], Attention], call: Call
    ) -> Reduction:
        """What a step does to the vision tokens (G, N, D) of a group of images."""
        assert call.tower is not None  # by _compute_features
        state, n = call.tower, tokens.shape[1]
        keep = self.chooser.tokens_to_keep(cut, n)
        if keep == n:
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
                part=self.chooser.part(cut.step),
                place=cut.name,
                question=question,
            )
            reduction = self.chooser.choose(cut, view, keep)
        state.record_decoder_cut(cut, reduction, group.images)
        return reduction

    def _start_stage(self, number: int, x: Tensor, cache: Any, run: DecoderPass) -> None:
        """Sets which tokens the layers from this one on get, and what they may attend to."""
        alive, bias = run.left & run.real, run.bias
        most = int(alive.sum(1).amax())
        if most < x.shape[1]:
            order = (~alive).int().argsort(dim=1, stable=True)[:, :most]  # those that are left, then others to fill up
            run.at = order.sort(dim=1).values  # (B, K)
            alive = alive.gather(1, run.at)
            bias = None if bias is None else bias.gather(1, run.at)
        stage = Stage(alive, bias)
        if cache is not None:
            stage = self._update_cache(cache, number, stage, run)
        run.mask = self.vlm.decoder.mask(stage.alive, alive.shape[1], stage.bias, x.dtype)

    def _update_cache(self, cache: Any, number: int, new: Stage, run: DecoderPass) -> Stage:
        """Records on the cache what the layers from this one on have seen, with what comes now."""
        past, record = cached_length(cache, number), cache_record(cache)
        if record is None:
            record = CacheRecord(self.plan, past)
            cache.__class__ = pruned_cache_class(type(cache))  # type: ignore[arg-type]
            cache.tokensieve_record = record
        if number == min(self.cuts):
            record.n_tokens_fed += run.real.shape[1]
        if past:
            earlier = new.alive.new_ones((len(new.alive), past)) if run.past is None else run.past
            before = record.stages.get(number, Stage(earlier))
            if before.alive.shape[1] < past or len(before.alive) != len(new.alive):
                raise UserError(
                    f"the cache of layer {number} holds {past} tokens of {len(new.alive)} prompts, but under this plan "
                    f"{before.alive.shape[1]} of {len(before.alive)} went in; go on with it as it was, or begin without one"
                )
            new = before.first(past).then(new)  # fewer: the cache was cropped
        record.stages[number] = new
        return new

    def _question_mask(self, call: Call, real: Tensor, image_mask: Tensor) -> Tensor:
        """Which tokens are the question: what the context says, else the prompt's text: (B, L)."""
        mask = call.context.get("question")
        if mask is not None:
            if mask.shape != real.shape:
                raise UserError(f'context["question"] is {tuple(mask.shape)}, but the sequences are {tuple(real.shape)}')
            return torch.as_tensor(mask).to(real.device, torch.bool)
        state = _decoder_call(call)
        text = real & ~image_mask
        if state.labels is not None and state.labels.shape == text.shape:
            without_label = text & (state.labels.to(text.device) == -100)
            text = torch.where(without_label.any(1, keepdim=True), without_label, text)  # labels on all tokens say nothing
        if state.prompt_length is not None:
            text[:, state.prompt_length :] = False  # without a cache, what was generated comes again with every step
        return text


def _decoder_call(call: Call) -> DecoderCall:
    if call.decoder is None:
        call.decoder = DecoderCall()
    return call.decoder


def _run_directly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _check_features(features: Tensor, computed: ImageFeatures | None) -> None:
    """Raises a UserError if these are not the features that were computed last, once or several times (beams)."""
    if computed is None:
        raise UserError("features of images were given that were computed before the plan was on; give pixel values")
    times = len(features.flatten(0, -2)) / sum(computed.lengths)
    total, size = float(features.detach().sum(dtype=torch.float64)), float(features.detach().abs().sum(dtype=torch.float64))
    if times != int(times) or abs(total - times * computed.total) > 1e-2 * (1 + size**0.5):
        raise UserError("the features of images are not those that were computed last; give pixel values with every call")


def _group_images(image_mask: Tensor, features: ImageFeatures) -> list[Group]:
    """The images of a pass by their placeholders (B, L), those with equally many tokens together."""
    counts: list[int] = image_mask.sum(1).tolist()
    times, rest = divmod(sum(counts), sum(features.lengths))  # beams: every row and its images several times
    assert not rest and len(counts) % times == 0
    positions = image_mask.nonzero()[:, 1].tolist()  # row by row
    by_length: dict[int, list[tuple[int, int, list[int]]]] = {}
    image = done = 0
    for row, count in enumerate(counts):
        if row % times == 0:
            first = image  # of this prompt
        image, until = first, done + count
        while done < until:
            n = features.lengths[image]
            by_length.setdefault(n, []).append((image, row, positions[done : done + n]))
            image, done = image + 1, done + n
        if done != until:
            raise UserError("an image's tokens are split between two prompts; give every prompt whole images")
    groups = []
    for members in by_length.values():
        images, rows, at = (torch.tensor(column, device=image_mask.device) for column in zip(*members, strict=True))
        if features.kept is not None:
            at = at.gather(1, features.kept[images])
        groups.append(Group(images, rows, at, None if features.sizes is None else features.sizes[images]))
    return groups


def _flat_index(at: Tensor, length: int) -> Tensor:
    """Positions (B, K) in rows of that length, counted through all rows: whole rows are copied faster than single numbers."""
    return (at + torch.arange(len(at), device=at.device)[:, None] * length).flatten()


def _gather_rows(x: Tensor, at: Tensor) -> Tensor:
    """The states x (B, L, D) at these positions (B, K): (B, K, D)."""
    return x.flatten(0, 1).index_select(0, _flat_index(at, x.shape[1])).view(*at.shape, x.shape[2])


def _pack_question(x: Tensor, mask: Tensor) -> Question:
    """The marked tokens of each row, moved together: (B, L, E), (B, L) -> (B, T, E)."""
    most = max(1, int(mask.sum(1).amax()))
    order = (~mask).int().argsort(dim=1, stable=True)[:, :most]
    return Question(_gather_rows(x, order), mask.gather(1, order))
