"""A plan inside a language decoder: the layers after a cut run on fewer tokens, and everything around them on all of them.

Each layer is handed the tokens that are left, and what it makes of them is put back to where they were, so that the model
around the layers (deep features, final norm, head, loss) sees the length it knows; a dropped token keeps the state it had then.
Positions stay the original ones. The cache of a layer holds only what the layer has seen; which of its entries may be looked at
is written on the cache itself, so that generation goes on from it: step by step, in batches with padding, with beams, from a
copy of it, or after its last tokens were taken back.

Merged tokens carry their sizes into the decoder: log(size) is added to the attention logits of those keys, so that a token that
stands for five patches is heard as five (flash attention takes no such bias; there each is heard as one).

With a soft reduction nothing is dropped: log(soft) is added to the attention logits of those keys from this layer on, which is
what dropping is when soft is 0 or 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tokensieve.core import Question, Reduction
from tokensieve.cutting.cache import CacheRecord, Stage, cache_record, cached_length, pruned_cache_class
from tokensieve.errors import PlanWarning, UserError
from tokensieve.models.patching import Patch
from tokensieve.models.patching import replace as replace_method
from tokensieve.models.tower import Undo
from tokensieve.models.vlm import Vlm
from tokensieve.scoring import Attention

MIN_KEEP_PROBABILITY = torch.finfo(torch.float32).tiny  # the smallest probability of staying whose logarithm is taken


@dataclass
class ImageFeatures:
    """The images whose features were computed last."""

    lengths: list[int]  # tokens of each image, as placeholders in the sequence count them
    total: float  # the sum of their features, by which they are known again
    kept: Tensor | None = None  # (I, K), which of them the tower left, in raster order; None: all
    sizes: Tensor | None = None  # (I, K), patches that each of those stands for; None: one each


@dataclass
class Group:
    """Images of a pass that have equally many tokens left."""

    images: Tensor  # (G,), numbers among the images of Shown
    rows: Tensor  # (G,), the sequences they stand in
    at: Tensor  # (G, N), where their tokens stand in it
    sizes: Tensor | None = None  # (G, N), patches that each token stands for


@dataclass
class Run:
    """One forward pass of the decoder."""

    past: Tensor | None  # (B, P), False where the tokens before these are padding; None: none is
    real: Tensor  # (B, L), False where the new tokens are padding
    question: Tensor  # (B, L)
    groups: list[Group]
    left: Tensor  # (B, L), which of the new tokens have not been dropped
    bias: Tensor | None = None  # (B, L), log of sizes and of soft masks so far
    at: Tensor | None = None  # (B, K), where the tokens that are left stand; None: all are
    mask: Tensor | None = None  # as the layers of this stage want it
    tables: tuple[Tensor, ...] = ()  # (B, K, d), rotary angles of the tokens that are left

    def to(self, device: torch.device) -> None:
        """Everything goes to where the next layer is, where a model is spread over several devices."""
        for holder in (self, *self.groups):
            for name, value in vars(holder).items():
                if isinstance(value, Tensor):
                    setattr(holder, name, value.to(device))
        self.tables = tuple(table.to(device) for table in self.tables)


@dataclass
class Prompt:
    """The text that a pass was given."""

    ids: Tensor | None  # (B, L)
    real: Tensor | None  # (B, L), the attention mask


class Decides(Protocol):
    """What a handle lets a step decide about the tokens of some images."""

    def __call__(
        self,
        cut: Any,
        tokens: Tensor,  # (G, N, D)
        images: Tensor,  # (G,), their numbers in the batch
        sizes: Tensor | None,  # (G, N)
        question: Question | None,
        attend: Callable[[], Attention],
    ) -> Reduction: ...


@dataclass
class Decoding:
    """The decoder's share of a handle."""

    vlm: Vlm
    cuts: dict[int, list[Any]]  # by layer; layer 0 is there, perhaps with none, if the tower is cut
    decide: Decides
    # what the tower left of so many images: which (I, K), their sizes (None: one each), and N; None: all
    left_of: Callable[[int], tuple[Tensor, Tensor | None, int] | None]
    asked: Callable[[], Tensor | None]  # (B, L), the caller's own mask of the question
    plan: str
    shown: ImageFeatures | None = None
    prompt: Prompt | None = None
    prompted: int | None = None  # tokens of the prompt, while generate() runs
    run: Run | None = None
    pictured: Tensor | None = None  # (B, L), placeholders of the pass under way
    labels: Tensor | None = None  # (B, L), of the call under way: what is to be said is not asked
    warned: bool = False  # that nothing was cut

    # --- on and off ---------------------------------------------------------------------------------------------

    def attach(self) -> list[Undo]:
        """Hooks on the model, to be undone by the list."""
        inner, decoder = self.vlm.inner, self.vlm.decoder
        undo = [
            replace_method(inner, "get_image_features", self._features(inner.get_image_features)),
            replace_method(inner, "get_placeholder_mask", self._placeholders(inner.get_placeholder_mask)),
            inner.register_forward_pre_hook(Patch(self._given), with_kwargs=True).remove,
            decoder.module.register_forward_pre_hook(Patch(self._start), with_kwargs=True).remove,
            decoder.module.register_forward_hook(Patch(self._finish)).remove,
            self.forget,
        ]
        if self.vlm.model is not inner:
            undo.append(self.vlm.model.register_forward_pre_hook(Patch(self._called), with_kwargs=True).remove)
        if hasattr(self.vlm.model, "generate"):
            undo.append(replace_method(self.vlm.model, "generate", self._generate(self.vlm.model.generate)))
        first = min(self.cuts, default=decoder.depth)
        for number in range(first, decoder.depth):
            layer = decoder.layers[number]
            undo.append(replace_method(layer, "forward", self._layer(number, layer.forward)))
        return undo

    def forget(self) -> None:
        """Nothing of an earlier pass is left."""
        self.shown = self.prompt = self.prompted = self.run = self.pictured = self.labels = None

    def question_of(self, images: int, tokens: int) -> Question | None:
        """What the prompt asks about each of the images whose features are being computed: the decoder's input embeddings.

        tokens: how many placeholders each image has.
        """
        if self.prompt is None or self.prompt.ids is None:
            return None
        ids = self.prompt.ids
        pictured = ids == self.vlm.inner.config.image_token_id  # (B, L)
        counts = pictured.sum(1) // tokens
        if int(counts.sum()) != images:
            raise UserError(f"{images} images, but the prompts have places for {int(counts.sum())}, of {tokens} tokens each")
        real = torch.ones_like(pictured) if self.prompt.real is None else self.prompt.real.to(ids.device, torch.bool)
        mask = self._question(real[:, -ids.shape[1] :], pictured)
        embedded = self.vlm.inner.get_input_embeddings()(ids)
        return _pack_question(embedded, mask).rows(torch.arange(len(ids), device=ids.device).repeat_interleave(counts))

    # --- around the decoder -------------------------------------------------------------------------------------

    def _generate(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def generate(inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            ids = kwargs.get("input_ids", inputs)
            self.prompt = Prompt(ids, kwargs.get("attention_mask"))
            self.prompted = None if ids is None else ids.shape[1]
            try:
                return stock(inputs, *args, **kwargs)
            finally:
                self.prompted = self.run = None

        return generate

    def _called(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.labels = kwargs.get("labels")

    def _given(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.prompted is None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            self.prompt = Prompt(ids, kwargs.get("attention_mask"))
        self.pictured = None

    def _features(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def get_image_features(*args: Any, **kwargs: Any) -> Any:
            out = stock(*args, **kwargs)
            features: Sequence[Tensor] = out.pooler_output
            left = self.left_of(len(features))
            lengths, kept, sizes = [len(feature) for feature in features], None, None
            if left is not None:  # each stands at its place among all; the others are gone before the first layer
                kept, sizes, n = left
                stacked = torch.stack(tuple(features))  # (I, K, E)
                full = stacked.new_zeros((stacked.shape[0], n, stacked.shape[2]))
                out.pooler_output = list(full.scatter(1, kept[..., None].expand_as(stacked), stacked))
                kept, order = kept.sort(dim=1)
                lengths, sizes = [n] * len(features), None if sizes is None else sizes.gather(1, order)
            total = float(torch.cat(tuple(features)).detach().sum(dtype=torch.float64))
            self.shown = ImageFeatures(lengths, total, kept, sizes)
            return out

        return get_image_features

    def _placeholders(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def get_placeholder_mask(*args: Any, **kwargs: Any) -> Any:
            answer = stock(*args, **kwargs)
            features = kwargs.get("image_features", args[2] if len(args) > 2 else None)
            if features is not None:
                self._recognise(features)
                mask = answer[0] if isinstance(answer, tuple) else answer
                self.pictured = mask[..., 0] if mask.dim() == 3 else mask  # (B, L)
            return answer

        return get_placeholder_mask

    # --- inside the decoder -------------------------------------------------------------------------------------

    def _recognise(self, features: Tensor) -> None:
        """A UserError if these are not the features that were computed last, once or several times (beams)."""
        if self.shown is None:
            raise UserError("features of images were given that were computed before the plan was on; give pixel values")
        times = len(features.flatten(0, -2)) / sum(self.shown.lengths)
        total, size = float(features.detach().sum(dtype=torch.float64)), float(features.detach().abs().sum(dtype=torch.float64))
        if times != int(times) or abs(total - times * self.shown.total) > 1e-2 * (1 + size**0.5):
            raise UserError("the features of images are not those that were computed last; give pixel values with every call")

    def _start(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pictured, self.pictured, self.run = self.pictured, None, None
        cache = kwargs.get("past_key_values")
        trace = cache_record(cache)
        x = kwargs.get("inputs_embeds")
        if x is None:  # text alone, given to the decoder itself
            x = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        batch, length = x.shape[:2]
        if pictured is None and trace is None:
            if length > 1 and not cached_length(cache, 0) and not self.warned:
                self.warned = True
                note = f"{self.plan}: no image in this prompt, or its features came in a way that is not known: nothing is cut"
                warnings.warn(note, PlanWarning, stacklevel=2)
            return
        if trace is not None and trace.plan != self.plan:
            raise UserError(
                f"this cache was filled under the plan {trace.plan}, and {self.plan} is on now; begin without a cache"
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise UserError(
                "a plan in the decoder needs the attention mask as (batch, length), or none: call generate() without a "
                "static cache, and the model without a mask of its own"
            )
        seen = cached_length(cache, 0) if trace is None else trace.seen
        if mask is not None and mask.shape[1] != seen + length:
            raise UserError(f"the attention mask is for {mask.shape[1]} tokens, but {seen} were fed and {length} come")
        self.vlm.decoder.check(length + seen)
        past, real = None, torch.ones((batch, length), dtype=torch.bool, device=x.device)
        if mask is not None:
            past, real = mask.to(x.device, torch.bool).split([seen, length], dim=1)
        if pictured is None:
            self.run = Run(past, real, real, [], torch.ones_like(real))
            return
        groups = self._groups(pictured)
        left = torch.ones_like(real)
        for group in groups:
            left[group.rows] &= ~pictured[group.rows]
        for group in groups:
            left[group.rows[:, None], group.at] = True
        self.run = Run(past, real, self._question(real, pictured), groups, left)
        for group in groups:
            if group.sizes is not None:
                self._weigh(self.run, group.rows, group.at, group.sizes)

    def _weigh(self, run: Run, rows: Tensor, at: Tensor, factor: Tensor) -> None:
        """The tokens `at` (G, N) of these rows are heard `factor` (G, N) times as loud as before, where the kernel can."""
        if not self.vlm.decoder.takes_bias:
            return
        bias = torch.zeros(run.real.shape, device=at.device) if run.bias is None else run.bias
        run.bias = bias.index_put((rows[:, None], at), factor.float().log(), accumulate=True)

    def _finish(self, module: Any, args: Any, out: Any) -> None:
        self.run = None

    def _layer(self, number: int, stock: Callable[..., Any]) -> Callable[..., Any]:
        starts = number in self.cuts

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            run, x = self.run, hidden_states  # (B, L, D)
            if run is None:
                return stock(x, *args, **kwargs)
            if run.left.device != x.device:
                run.to(x.device)
            tables: tuple[Tensor, Tensor] = kwargs["position_embeddings"]
            if starts:
                for cut in self.cuts[number]:
                    x = self._cut(cut, number, x, tables, run)
                self._narrow(number, x, kwargs.get("past_key_values"), run)
                run.tables = (
                    tables if run.at is None else tuple(_gather_rows(table.expand(len(x), -1, -1), run.at) for table in tables)
                )
            kwargs |= {"attention_mask": run.mask, "position_ids": None, "position_embeddings": run.tables}
            if run.at is None:
                return stock(x, *args, **kwargs)
            out = stock(_gather_rows(x, run.at), *args, **kwargs)
            made: Tensor = out[0] if isinstance(out, tuple) else out  # (B, K, D)
            x = x.to(made.device)
            whole = (
                x.flatten(0, 1)
                .index_copy(0, _flat_index(run.at.to(x.device), x.shape[1]), made.flatten(0, 1).to(x.dtype))
                .view_as(x)
            )
            return (whole, *out[1:]) if isinstance(out, tuple) else whole

        return forward

    def _cut(self, cut: Any, number: int, x: Tensor, tables: tuple[Tensor, Tensor], run: Run) -> Tensor:
        """Lets a step decide about every image's tokens and carries the decisions out: (B, L, D) -> same."""
        if not run.groups:
            return x
        groups = []
        asks = _pack_question(x, run.question)
        last = run.question.int().cumsum(1).argmax(1)  # (B,), the last token of the question
        for group in run.groups:
            rows, at = group.rows, group.at

            def attend(x: Tensor = x, rows: Tensor = rows, at: Tensor = at) -> Attention:
                cos, sin = (table.expand(len(x), -1, -1)[rows] for table in tables)
                seen, bias = (run.left & run.real)[rows], None if run.bias is None else run.bias[rows]
                asking = torch.maximum(last[rows], at.amax(1))  # where no text follows the image, its last token
                return self.vlm.decoder.attention(number, x[rows], (cos, sin), seen, asking, at, bias)

            tokens = x[rows[:, None], at]  # (G, N, D)
            reduction = self.decide(cut, tokens, group.images, group.sizes, asks.rows(rows), attend)
            if reduction.soft is not None:
                if not self.vlm.decoder.takes_bias:
                    raise UserError('a soft mask needs attn_implementation="sdpa" or "eager"; flash attention takes none')
                self._weigh(run, rows, at, reduction.soft.float().clamp_min(MIN_KEEP_PROBABILITY))
                groups.append(group)
                continue
            on = at.gather(1, reduction.index)  # (G, K)
            if reduction.weight is not None or reduction.gate is not None:
                x = x.index_put((rows[:, None], on), reduction.apply(tokens))
            run.left[rows[:, None], at] = False
            run.left[rows[:, None], on] = True
            if reduction.sizes is not None:
                before = 1.0 if group.sizes is None else group.sizes.gather(1, reduction.index)
                self._weigh(run, rows, on, reduction.sizes / before)
            groups.append(replace(group, at=on, sizes=reduction.sizes_after(group.sizes)))
        run.groups = groups
        return x

    def _narrow(self, number: int, x: Tensor, cache: Any, run: Run) -> None:
        """Which tokens the layers from this one on get, and what they may look at."""
        alive, bias = run.left & run.real, run.bias
        most = int(alive.sum(1).amax())
        if most < x.shape[1]:
            order = (~alive).int().argsort(dim=1, stable=True)[:, :most]  # those that are left first, then others to fill up
            run.at = order.sort(dim=1).values  # (B, K)
            alive = alive.gather(1, run.at)
            bias = None if bias is None else bias.gather(1, run.at)
        stage = Stage(alive, bias)
        if cache is not None:
            stage = self._remember(cache, number, stage, run)
        run.mask = self.vlm.decoder.mask(stage.alive, alive.shape[1], stage.bias, x.dtype)

    def _remember(self, cache: Any, number: int, new: Stage, run: Run) -> Stage:
        """What the layers from this one on have seen with what comes now, written on the cache."""
        past, trace = cached_length(cache, number), cache_record(cache)
        if trace is None:
            trace = CacheRecord(self.plan, past)
            cache.__class__ = pruned_cache_class(type(cache))  # type: ignore[arg-type]
            cache.trace = trace
        if number == min(self.cuts):
            trace.seen += run.real.shape[1]
        if past:
            earlier = new.alive.new_ones((len(new.alive), past)) if run.past is None else run.past
            before = trace.stages.get(number, Stage(earlier))
            if before.alive.shape[1] < past or len(before.alive) != len(new.alive):
                raise UserError(
                    f"the cache of layer {number} holds {past} tokens of {len(new.alive)} prompts, but under this plan "
                    f"{before.alive.shape[1]} of {len(before.alive)} went in; go on with it as it was, or begin without one"
                )
            new = before.first(past).then(new)  # fewer: the last ones were taken back
        trace.stages[number] = new
        return new

    # --- what stands where --------------------------------------------------------------------------------------

    def _groups(self, pictured: Tensor) -> list[Group]:
        """The images of a pass, found by their placeholders (B, L), those with equally many tokens together."""
        assert self.shown is not None  # by _recognise
        counts: list[int] = pictured.sum(1).tolist()
        times, rest = divmod(sum(counts), sum(self.shown.lengths))  # beams: every row and its images several times
        assert not rest and len(counts) % times == 0
        places = pictured.nonzero()[:, 1].tolist()  # row by row
        found: dict[int, list[tuple[int, int, list[int]]]] = {}
        image = done = 0
        for row, count in enumerate(counts):
            if row % times == 0:
                first = image  # of this prompt
            image, until = first, done + count
            while done < until:
                n = self.shown.lengths[image]
                found.setdefault(n, []).append((image, row, places[done : done + n]))
                image, done = image + 1, done + n
            if done != until:
                raise UserError("an image's tokens are split between two prompts; give every prompt whole images")
        groups = []
        for members in found.values():
            images, rows, at = (torch.tensor(part, device=pictured.device) for part in zip(*members, strict=True))
            if self.shown.kept is not None:
                at = at.gather(1, self.shown.kept[images])
            groups.append(Group(images, rows, at, None if self.shown.sizes is None else self.shown.sizes[images]))
        return groups

    def _question(self, real: Tensor, pictured: Tensor) -> Tensor:
        """Which tokens are the question: what the caller says, else the prompt's text: (B, L)."""
        given = self.asked()
        if given is not None:
            if given.shape != real.shape:
                raise UserError(f'context["question"] is {tuple(given.shape)}, but the sequences are {tuple(real.shape)}')
            return given.to(real.device, torch.bool)
        text = real & ~pictured
        if self.labels is not None and self.labels.shape == text.shape:
            untold = text & (self.labels.to(text.device) == -100)
            text = torch.where(untold.any(1, keepdim=True), untold, text)  # labels that are the whole prompt tell nothing
        if self.prompted is not None:
            text[:, self.prompted :] = False  # without a cache, what was generated comes again with every step
        return text


def _flat_index(at: Tensor, length: int) -> Tensor:
    """Places (B, K) in rows of that length, counted through all rows: whole rows are copied faster than single numbers."""
    return (at + torch.arange(len(at), device=at.device)[:, None] * length).flatten()


def _gather_rows(x: Tensor, at: Tensor) -> Tensor:
    """The states x (B, L, D) at these places (B, K): (B, K, D)."""
    return x.flatten(0, 1).index_select(0, _flat_index(at, x.shape[1])).view(*at.shape, x.shape[2])


def _pack_question(x: Tensor, mask: Tensor) -> Question:
    """The marked tokens of each row, moved together: (B, L, E), (B, L) -> (B, T, E)."""
    most = max(1, int(mask.sum(1).amax()))
    order = (~mask).int().argsort(dim=1, stable=True)[:, :most]
    return Question(_gather_rows(x, order), mask.gather(1, order))
