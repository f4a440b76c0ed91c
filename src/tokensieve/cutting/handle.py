"""apply(model, plan): the stock model runs on fewer tokens until the handle is removed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import reduce
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Question, Reduction, View
from tokensieve.cutting.decoder import Decoding
from tokensieve.cutting.passes import Pass, Row
from tokensieve.cutting.placement import Cut, all_kept_note, check_token_counts, place_plan
from tokensieve.errors import NotFinite, PlanWarning, Uncuttable, UserError
from tokensieve.models.patching import Patch, replace
from tokensieve.models.registry import open_tower, open_vlm
from tokensieve.models.tower import Block, Layout, Tower, Undo
from tokensieve.parts.protocol import Weights
from tokensieve.parts.resolve import load_parts
from tokensieve.plan import Plan, Step
from tokensieve.rest import apply_rest
from tokensieve.scoring import Attention

if TYPE_CHECKING:
    from tokensieve.drawing.sheet import Picture


class Handle:
    """What apply returns: attached to the model until removed; a context manager."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        seed: int = 0,
        context: Mapping[str, Any] | None = None,
        parts: Mapping[str, nn.Module] | nn.ModuleDict | None = None,
    ) -> None:
        self.plan = plan
        self.context = context or {}
        self.parts = dict(parts.items()) if parts else {}  # trained modules by the name of their method
        self.notes: list[str] = []
        self.samples: Tensor | None = None  # (B,), numbers of the images of the next batches; None: counted as they come
        self._undo: list[Undo] = []
        self._seen = 0  # images so far, so that random choices do not depend on batches
        self._pass: Pass | None = None
        self._layout: Layout | None = None  # of the batch under way
        self._tower: Tower | None = None
        self._decoding: Decoding | None = None
        self._cuts: list[Cut] = []  # of the tower
        self._weighs = False  # the pooling and the blocks are ready for sizes
        if not plan.is_identity:
            self._open(model, seed)

    def _open(self, model: nn.Module, seed: int) -> None:
        """Finds the places of the plan in the model."""
        vlm = open_vlm(model)
        self._tower = open_tower(model) if vlm is None else vlm.tower
        cuts = place_plan(self.plan, self._tower, seed, None if vlm is None else vlm.decoder.depth, self.parts)
        self._cuts = [cut for cut in cuts if cut.part != "llm"]
        if self._tower is not None:
            for cut in self._cuts if self._tower.no_blocks_reason else ():
                if cut.step.where.part != "out":
                    raise Uncuttable(f"{cut.step}: {self._tower.no_blocks_reason}; cut @out")
            self._tower.check()
            self.notes = check_token_counts(cuts, self._tower, self.parts)
        elif self._cuts:
            assert vlm is not None
            raise Uncuttable(f"{self._cuts[0].step}: {vlm.reason}")
        if vlm is not None:
            layers: dict[int, list[Cut]] = {0: []} if self._cuts else {}
            for cut in cuts:
                if cut.part == "llm":
                    layers.setdefault(cut.layer, []).append(cut)
            vlm.decoder.check(0)
            if not vlm.decoder.takes_bias and any(self._makes_sizes(cut.step) for cut in cuts):
                told = (
                    f"{self.plan}: {vlm.decoder.implementation} takes no bias, so that the decoder hears a merged token as one"
                )
                self.notes.append(f'{told}; attn_implementation="sdpa" hears it as often as it stands for patches')
            if cuts[-1].step.rest == "zero":
                raise UserError(f"{cuts[-1].step}: rest=zero would have the decoder read empty tokens; use rest=drop")
            asked = lambda: self.context.get("question")  # noqa: E731
            self._decoding = Decoding(vlm, layers, self._decide, self._left_of, asked, str(self.plan))

    # --- on and off ---------------------------------------------------------------------------------------------

    def attach(self) -> Handle:
        """Puts the plan on the model; nothing changes where it is on already."""
        if self._undo or self.plan.is_identity:
            return self
        cut = [*(block.module for block in self._tower.blocks), self._tower.head] if self._tower else []
        on = [module.__dict__.get("forward") for module in cut if module is not None]
        on += [self._decoding.vlm.inner.__dict__.get("get_image_features")] if self._decoding else []
        if any(isinstance(function, Patch) for function in on):
            raise UserError("another plan is on this model already; remove() its handle first")
        if self._decoding is not None:
            self._undo += self._decoding.attach()
        if self._tower is None or not self._cuts:
            return self
        self._weighs = any(self._makes_sizes(cut.step) for cut in self._cuts)
        if self._weighs:
            self._undo += self._tower.patch_pooling(lambda: self._pass.sizes if self._pass else None)
        self._undo += self._tower.on_layout(self._told)
        at_head = [cut for cut in self._cuts if self._at_head(cut)]
        heard = any("attention" in cut.step.method.needs for cut in at_head)  # that of the last block
        sizes_flow = False
        for number, block in enumerate(self._tower.blocks, start=1):
            cuts = [cut for cut in self._cuts if cut.layer == number or (number == 1 and cut.layer == 0)]
            cuts = [cut for cut in cuts if cut not in at_head]
            kept = heard and number == self._tower.depth
            if number == 1 or cuts or sizes_flow or kept or self._tower.per_token:
                self._undo.append(replace(block.module, "forward", self._forward(block, number, cuts, kept)))
            sizes_flow = sizes_flow or any(self._makes_sizes(cut.step) for cut in cuts)
        if at_head:
            assert self._tower.head is not None
            self._undo.append(replace(self._tower.head, "forward", self._head_forward(at_head)))
        return self

    def _at_head(self, cut: Cut) -> bool:
        return cut.part == "out" and self._tower is not None and self._tower.head is not None

    def remove(self) -> None:
        """Takes the plan off; the model is what it was, to the bit."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Handle:
        return self.attach()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    # --- what the last batch did --------------------------------------------------------------------------------

    @property
    def ledger(self) -> list[Row]:
        """Patch tokens in and out at each cut, in the last batch."""
        return list(self._pass.ledger) if self._pass else []

    @property
    def reduction(self) -> Reduction | None:
        """All cuts of the last batch as one reduction of the original patches.

        None if nothing was cut, if patch dropout (in training) left no raster to count in, or if images had different numbers
        of tokens.
        """
        if self._pass is None or not self._pass.whole or not self._pass.stages or self._pass.uneven:
            return None
        return reduce(Reduction.then, (reduction for _, reduction in self._pass.stages))

    @property
    def stages(self) -> list[tuple[str, Reduction]]:
        """Every cut of the last batch that cut something: where it stood and what it did to the tokens it saw."""
        return list(self._pass.stages) if self._pass else []

    @property
    def soft(self) -> list[tuple[str, Reduction]]:
        """Every cut of the last batch in which nothing was dropped yet: where it stood, and the probabilities of staying."""
        return list(self._pass.soft) if self._pass else []

    @property
    def kept(self) -> Tensor | None:
        """Raster indices of the surviving patches; of merged tokens, their representatives: (B, K)."""
        total = self.reduction
        return None if total is None else total.index

    @property
    def groups(self) -> Tensor | None:
        """The output token each patch went to, -1 where it was dropped: (B, N)."""
        total = self.reduction
        return None if total is None else total.groups

    @property
    def grid(self) -> tuple[int, int] | None:
        """(h, w) of the last batch's patches, before any batch the configured one; None if there is none or not one for all."""
        return self._pass.grid if self._pass else self._tower.grid if self._tower else None

    def picture(
        self, image: Any, batch_index: int = 0, transform: Callable[[Any], Any] | None = None, name: str = ""
    ) -> Picture:
        """What the plan did to an image of the last batch, as a matplotlib figure; see `pictures.picture`."""
        from tokensieve.drawing import sheet

        return sheet.picture(self, image, batch_index, transform, name)

    # --- inside the forward pass --------------------------------------------------------------------------------

    def _forward(self, block: Block, number: int, cuts: list[Cut], kept: bool = False) -> Callable[..., Tensor]:
        """The block with its cuts. kept: its attention is wanted after it, where the tower's head is cut."""
        stock = block.module.forward
        before = [cut for cut in cuts if cut.layer == 0]
        inside = [cut for cut in cuts if cut.part == "attn"]
        after = [cut for cut in cuts if cut.layer == number and cut.part != "attn"]
        asked = kept or bool(inside) or any("attention" in cut.step.method.needs for cut in after)
        only_zeros = not inside and all(cut.step.rest == "zero" for cut in after)  # S1: the CLS feature stays, to the bit

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if number == 1 or self._pass is None:
                x, self._pass = self._begin(x)
            state = self._pass
            for cut in before:
                x = self._cut(cut, x, state)
            args, named = block.select_inputs(state.at, args, kwargs)
            if asked or state.bias is not None:
                opened, state.attention = block.attend(x, state.bias, *args, **named)
                state.since = None
                for cut in inside:
                    opened = self._cut(cut, opened, state)
                x = stock(x, *args, **named) if only_zeros and state.bias is None else block.mlp(opened)
            else:
                x = stock(x, *args, **named)
            for cut in after:
                x = self._cut(cut, x, state)
            if not kept:
                state.attention = None
            return x

        return forward

    def _head_forward(self, cuts: list[Cut]) -> Callable[[Tensor], Tensor]:
        """The head of a model that lets the tokens through once more after the tower: (B, 1+N, E) -> (B, 1+K, E)."""

        def forward(x: Tensor) -> Tensor:
            assert self._tower is not None
            if self._pass is None or not self._tower.blocks:
                self._pass = self._begin_pass(len(x), x.shape[1] - 1, x.device)
            for cut in cuts:
                x = self._cut(cut, x, self._pass)
            self._pass.attention = None
            return x

        return forward

    def _makes_sizes(self, step: Step) -> bool:
        part = self.parts.get(step.method.name)
        return not step.method.selects or step.rest != "drop" or (part is not None and part.training)  # its gate goes by sizes

    def _told(self, layout: Layout) -> None:
        self._layout = layout

    def _begin(self, x: Tensor) -> tuple[Tensor, Pass]:
        """The tokens without padding, and a new pass for them."""
        assert self._tower is not None
        self._tower.check()
        if self._layout is not None and self._layout.padded:
            x = x[:, : self._tower.prefix + self._layout.n]
        return x, self._begin_pass(len(x), x.shape[1] - self._tower.prefix, x.device)

    def _begin_pass(self, rows: int, n: int, device: torch.device) -> Pass:
        """A new pass for so many images, of each of which n patches arrived."""
        assert self._tower is not None
        h, w = self._tower.grid
        layout = self._layout or Layout((h, w), h * w)
        return Pass(samples=self._numbers(rows).to(device), grid=layout.grid, whole=n == layout.n)

    def _cut(self, cut: Cut, x: Tensor, state: Pass) -> Tensor:
        """Lets the step's method decide at this point and carries the decision out: (B, P+N, D) -> (B, P+K, D)."""
        assert self._tower is not None
        at_head = self._at_head(cut)
        step, p = cut.step, 1 if at_head else self._tower.prefix
        prefix, tokens = x[:, :p], x[:, p:]
        n = tokens.shape[1]
        keep = self._keep(cut, n)
        if keep == n:
            state.ledger.append(Row(cut.name, n, n))
            return x
        with torch.autocast(x.device.type, enabled=False):  # it would round every product of the scores to 16 bits
            view = View(
                tokens=tokens,
                prefix=prefix,
                grid=state.grid if state.whole and not state.stages else None,
                attention=state.seen() if "attention" in step.method.needs else None,
                sizes=state.sizes,
                samples=state.samples,
                seed=cut.seed,
                context={**self._tower.context(), **self.context},
                part=self.parts.get(step.method.name),
                pooling=self._tower.pooling if not at_head else None,
                place=cut.name,
                question=self._question(cut, len(x), state),
                has_cls=at_head or self._tower.has_cls,
            )
            reduction = self._chosen(cut, view, keep)
            if reduction.soft is not None:
                raise UserError(f"{step}: a soft choice can stand in a decoder only, at @llm.L")
            state.stages.append((cut.name, reduction))
            state.ledger.append(Row(cut.name, n, reduction.k))
            if step.rest == "zero":
                kept = view.sizes_or_ones().gather(1, reduction.index)
                state.sizes = torch.zeros_like(view.sizes_or_ones()).scatter(
                    1, reduction.index, kept
                )  # nobody stands at a zero
                return torch.cat([prefix, reduction.zero_fill(tokens)], dim=1)
            state.sizes = reduction.sizes_after(state.sizes)
            if state.sizes is not None and not self._weighs:
                raise UserError(
                    f"{step}: train() was called with the plan on, which would lose gradients; call it before apply"
                )
            state.bias = None if state.sizes is None else F.pad(state.sizes.log(), (p, 0))[:, None, None]
            state.since = reduction.index if state.since is None else state.since.gather(1, reduction.index)
            state.at = reduction.index if state.at is None else state.at.gather(1, reduction.index)
            return torch.cat([prefix, reduction.apply(tokens)], dim=1)

    def _keep(self, cut: Cut, n: int) -> int:
        """How many of the n tokens that are there go on."""
        keep = cut.budget.count(n)
        if keep < 1:
            raise UserError(f"{cut.step} at layer {cut.name} leaves no token of {n}")
        if keep == n:
            note = all_kept_note(cut, n)
            if note not in self.notes:  # images smaller than the configured size
                self.notes.append(note)
                warnings.warn(note, PlanWarning, stacklevel=2)
        return keep

    def _chosen(self, cut: Cut, view: View, keep: int) -> Reduction:
        """What the step's method decides, with its rest; checked for NaN, which would be ranked first."""
        if not torch.isfinite(view.tokens.sum(dtype=torch.float32)):
            raise NotFinite(f"the tokens at layer {cut.name} hold NaN or infinity, so nothing can be ranked there")
        chosen = cut.step.method.decide(view, keep, **cut.step.arguments())
        if chosen.scores is not None and not torch.isfinite(chosen.scores.sum(dtype=torch.float32)):
            raise NotFinite(f"{cut.step} at layer {cut.name}: its scores hold NaN or infinity")
        return chosen if chosen.soft is not None else apply_rest(view, chosen, cut.step.rest)

    # --- where a language model reads the tokens ----------------------------------------------------------------

    def _question(self, cut: Cut, images: int, state: Pass) -> Question | None:
        """What is asked about each image, where a method of the tower wants to know."""
        if "question" not in cut.step.method.needs or self._decoding is None or self._tower is None:
            return None
        h, w = state.grid or self._tower.grid
        return self._decoding.question_of(images, h * w)

    def _left_of(self, images: int) -> tuple[Tensor, Tensor | None, int] | None:
        """Which patches the tower left of the images that it just saw, their sizes, and how many there were; None: all."""
        if not self._cuts:  # the tower is as it was, so it told nothing
            self._pass = Pass(samples=self._numbers(images), grid=self._tower.grid if self._tower else None, whole=True)
            return None
        assert self._pass is not None
        if self._pass.at is None:
            return None
        if not self._pass.whole or self._pass.grid is None:
            raise UserError("patches of the images are missing before any cut (patch dropout), so their places are not known")
        h, w = self._pass.grid
        return self._pass.at, self._pass.sizes, h * w

    def _numbers(self, images: int) -> Tensor:
        """The numbers of the images of a batch within the run: (B,)."""
        spread = self._tower.expand_sample_ids if self._tower is not None else lambda samples: samples
        if self.samples is not None:
            return spread(self.samples)
        first, self._seen = self._seen, self._seen + images // len(spread(torch.zeros(1)))  # an object may have several images
        return spread(torch.arange(first, self._seen))

    def _decide(
        self,
        cut: Cut,
        tokens: Tensor,
        images: Tensor,
        sizes: Tensor | None,
        question: Question | None,
        attend: Callable[[], Attention],
    ) -> Reduction:
        """What a step inside the decoder does to the vision tokens (G, N, D) of these images (G,) of the batch."""
        assert self._pass is not None
        state, n = self._pass, tokens.shape[1]
        keep = self._keep(cut, n)
        if keep == n:
            everything = torch.arange(n, device=tokens.device).expand(len(tokens), -1)
            state.note(cut, Reduction(everything, n), images)
            return Reduction(everything, n)
        h, w = state.grid or (0, 0)
        with torch.autocast(tokens.device.type, enabled=False):
            view = View(
                tokens=tokens,
                prefix=tokens[:, :0],
                grid=(h, w) if h * w == n and not state.stages else None,
                attention=attend() if "attention" in cut.step.method.needs else None,
                sizes=sizes,
                samples=state.samples.to(images.device)[images],
                seed=cut.seed,
                context=self.context,
                part=self.parts.get(cut.step.method.name),
                place=cut.name,
                question=question,
            )
            reduction = self._chosen(cut, view, keep)
        state.note(cut, reduction, images)
        return reduction


def apply(
    model: nn.Module,
    plan: Plan | str,
    *,
    seed: int = 0,
    context: Mapping[str, Any] | None = None,
    weights: Weights = None,
) -> Handle:
    """The model, changed in place, runs by the plan until handle.remove(), or within `with apply(...)`.

    Whether the plan fits the model is decided here, before any image: a layer that does not exist, a method that needs
    what the tower does not have, a budget that leaves nothing. Weights, state_dict keys and the model's own API stay.
    weights: the file of a method that is trained (or several files, or modules by the method's name).
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    handle = Handle(model, plan, seed, context, load_parts(plan, model, weights))
    for note in handle.notes:
        warnings.warn(note, PlanWarning, stacklevel=2)
    return handle.attach()
