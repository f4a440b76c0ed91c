"""A plan in a vision tower: the forward of blocks with cuts, of blocks behind a merge, and of the head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core import Question, Reduction, View
from tokensieve.cutting.choice import Chooser
from tokensieve.cutting.passes import BETWEEN_TILES, Call, Calls, Pass, Row, TileCounts, check_sample_count, row_of_images
from tokensieve.cutting.placement import Cut, ResizedTower
from tokensieve.cutting.rows import RowCut, choose_by_rows
from tokensieve.errors import UserError
from tokensieve.models.image_grid import IMAGE
from tokensieve.models.patching import check_attention, check_own, is_patched, replace, run_stock
from tokensieve.models.resizing import Resizing
from tokensieve.models.tower import Block, Layout, Tower, Undo

LOST = "Somebody has set the forward of a module since the plan was attached; remove() the plan and apply it again"

# call, patches of each image -> the question of each image; None: there is no question
FindQuestion = Callable[[Call, Sequence[int]], Question | None]
# cut, call, tokens of each row of the batch -> the tokens that each row keeps of a budget that they share
ShareBudget = Callable[[Cut, Call, Sequence[int]], list[int]]


class TowerCuts:
    """The cuts of a plan in one tower."""

    def __init__(
        self,
        tower: Tower,
        cuts: Sequence[Cut],
        chooser: Chooser,
        calls: Calls,
        question: FindQuestion | None,  # None: the tower is not that of a language model
        share: ShareBudget,
        resized: ResizedTower | None = None,
    ) -> None:
        self.tower, self.cuts, self.chooser, self.calls, self.question = tower, cuts, chooser, calls, question
        self.share = share
        self.resized = resized  # the plan makes images smaller
        self._tracks_sizes = False  # pooling and blocks take sizes into account; set by attach
        self._recorded: set[int] = set()  # blocks whose attention is kept for later cuts; set by attach
        self._n_replaced = 0  # blocks and head whose forward is replaced; set by attach

    @property
    def has_plan(self) -> bool:
        """Whether a plan is attached to the tower."""
        modules = [*(block.module for block in self.tower.blocks), self.tower.head]
        return any(is_patched(module, "forward") for module in modules if module is not None)

    @property
    def is_changed(self) -> bool:
        """Whether the plan changes anything in the tower."""
        return bool(self.cuts) or self.resized is not None

    def attach(self, undo: list[Undo]) -> None:
        """Attaches the cuts, and adds the functions that remove them, in reverse order. If it fails, those added so far do."""
        if not self.is_changed:  # the tower belongs to a model with a plan all the same: mark it, so that it takes no other
            undo += [replace(block.module, "forward", run_stock) for block in self.tower.blocks[:1]]
            return
        if self.resized is not None and self.tower.resize is not None:
            undo += self.tower.resize(Resizing(self.resized.to, self.resized.decide, self._set_full_grid))
        tower, makes_sizes = self.tower, self._makes_sizes
        self._tracks_sizes = any(map(makes_sizes, self.cuts))
        if self._tracks_sizes:
            undo += tower.patch_pooling(self._sizes)
        undo += tower.on_layout(self._set_layout)
        at_head = [cut for cut in self.cuts if self._is_at_head(cut)]
        with_attention = [cut for cut in at_head if "attention" in cut.step.method.needs]  # that of the last block
        has_sizes, first = any(makes_sizes(cut) for cut in self.cuts if cut.layer == 0), len(undo)
        self._recorded = _blocks_to_record(self.cuts, tower.depth)
        for number, block in enumerate(tower.blocks, start=1):
            cuts = [cut for cut in self.cuts if cut.layer == number or (number == 1 and cut.layer == 0)]
            cuts = [cut for cut in cuts if cut not in at_head]
            for_head = with_attention if number == tower.depth else []
            if self._keeps_padding:
                if number == 1:
                    undo.append(replace(block.module, "forward", self._run_first_block))
            elif number == 1 or cuts or has_sizes or for_head or tower.per_token or number in self._recorded:
                undo.append(self._replace_block(block, number, cuts, for_head, has_sizes))
            has_sizes = has_sizes or any(map(makes_sizes, cuts))
        if at_head:
            assert tower.head is not None
            undo.append(replace(tower.head, "forward", self._head_forward(at_head)))
        self._n_replaced = len(undo) - first
        undo += [self.calls.patch(entry, self._check_complete) for entry in tower.entries]

    @property
    def _keeps_padding(self) -> bool:
        """Whether padding stays in the batch, and its mask with it: nothing is cut, so images may have different grids."""
        return self.tower.pads and not self.cuts

    def _makes_sizes(self, cut: Cut) -> bool:
        """Whether tokens have sizes behind a cut: padding, where rows are left with different numbers of tokens, has size 0."""
        return cut.is_shared or self.chooser.makes_sizes(cut.step)

    def _is_at_head(self, cut: Cut) -> bool:
        return cut.part == "out" and self.tower.head is not None

    def _set_layout(self, layout: Layout) -> None:
        needs_images = any("pixels" in cut.step.method.needs for cut in self.cuts)
        self.calls.current.layout = layout if needs_images else dataclasses.replace(layout, images=None)

    def _set_full_grid(self, grid: tuple[int, int]) -> None:
        self.calls.current.full_grid = grid

    def _full_grid(self, call: Call) -> tuple[int, int] | None:
        """The grid before the plan made images smaller, of the first of them; None: it does not."""
        return None if self.resized is None else call.full_grid or self.resized.full_grid

    def _sizes(self) -> Tensor | None:
        """Sizes of the tokens of the call under way, (B, N)."""
        call = self.calls.latest
        return None if call is None or call.tower is None else call.tower.sizes

    # --- inside the forward pass --------------------------------------------------------------------------------

    def _replace_block(self, block: Block, number: int, cuts: list[Cut], for_head: list[Cut], has_sizes: bool) -> Undo:
        """Replaces the forward of a block by one with its cuts. Where the cuts keep everything, the stock block runs.

        for_head: the cuts at the head of the tower that need its attention. has_sizes: its tokens may have sizes.
        """
        before = [cut for cut in cuts if cut.layer == 0]
        inside = [cut for cut in cuts if cut.part == "attn"]
        after = [cut for cut in cuts if cut.layer == number and cut.part != "attn"]
        opening = [*for_head, *inside, *(cut for cut in after if {"attention", "before"} & set(cut.step.method.needs))]
        needs_before = any("before" in cut.step.method.needs for cut in after)
        is_recorded = number in self._recorded
        # With rest=zero alone the stock block runs too, so that the CLS feature stays bit-identical.
        only_zeros = not inside and all(cut.step.rest == "zero" for cut in after)
        is_split = has_sizes or is_recorded or (bool(opening) and not only_zeros)
        if is_split:
            _check_unwrapped(block, number)

        def forward(stock: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            call = self.calls.current
            if number == 1 or call.tower is None:
                with self.chooser.plan_work():
                    x = self._begin(x, call)
            state = call.tower
            assert state is not None
            state.n_replaced += 1
            for cut in before:
                x = self._cut(cut, x, call, state)
            args, named = block.select_inputs(state.patch_index, args, kwargs)
            n = x.shape[1] - self.tower.prefix
            if state.bias is not None or is_recorded or any(cut.acts(n, state.first) for cut in opening):
                opened, state.attention = block.attend(x, state.bias, *args, **named)
                state.attention_index = None
                if is_recorded:
                    state.earlier[number] = (state.attention, None)
                for cut in inside:
                    opened = self._cut(cut, opened, call, state)
                state.before = opened if needs_before else None
                x = stock(x, *args, **named) if only_zeros and state.bias is None else block.mlp(opened)
                for cut in after:
                    x = self._cut(cut, x, call, state)
            else:
                x = stock(x, *args, **named)
                for cut in (*inside, *after):
                    x = self._cut(cut, x, call, state)
            if not for_head:
                state.attention = None
            state.before = None
            return x

        return replace(block.module, "forward", forward, reimplements=is_split)

    def _run_first_block(self, stock: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The forward of the first block where nothing is cut: the stock one, and the start of a pass."""
        call = self.calls.current
        with self.chooser.plan_work():
            self._begin(x, call)
        assert call.tower is not None
        call.tower.n_replaced += 1
        return stock(x, *args, **kwargs)

    def _head_forward(self, cuts: list[Cut]) -> Callable[..., Tensor]:
        """The forward of the tower's head, which gets the projected tokens: (B, 1+N, E) -> (B, 1+K, E)."""

        def forward(stock: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            call = self.calls.current
            if call.tower is None or not self.tower.blocks:
                call.tower = self._new_pass(call, x.shape[0], x.shape[1] - 1, x.device)
            call.tower.n_replaced += 1
            x = stock(x)
            for cut in cuts:
                x = self._cut(cut, x, call, call.tower)
            call.tower.attention = None
            return x

        return forward

    def _check_complete(self, call: Call) -> None:
        """Raises a UserError if a block ran without the plan: somebody may have put back a forward that they had saved."""
        done = 0 if call.tower is None else call.tower.n_replaced
        if done != self._n_replaced:
            raise UserError(
                f"the plan did not run: {done} of the {self._n_replaced} modules that it changed were called. {LOST}"
            )

    def _begin(self, x: Tensor, call: Call) -> Tensor:
        """Starts a pass; returns the tokens without padding, unless it stays."""
        self.tower.check()
        rows, n, layout = x.shape[0], x.shape[1] - self.tower.prefix, call.layout
        if self.tower.pads and layout is not None:
            n = layout.n
            if not self._keeps_padding:
                if layout.no_cut_reason:
                    raise UserError(layout.no_cut_reason)
                x = x[:, : self.tower.prefix + n]
        call.tower = self._new_pass(call, rows, n, x.device)
        return x

    def _new_pass(self, call: Call, rows: int, n: int, device: torch.device) -> Pass:
        """A pass for this number of images with n patches each."""
        h, w = self.tower.grid
        layout = call.layout or Layout((h, w), h * w)
        grid = None if layout.no_cut_reason else layout.grid
        state = Pass(samples=self.sample_ids(call, rows, device), grid=grid, has_full_grid=n == layout.n, first=n)
        if (full := self._full_grid(call)) is not None:
            state.ledger.append(Row(IMAGE, full[0] * full[1], n))
        return state

    def sample_ids(self, call: Call, rows: int, device: torch.device) -> Tensor:
        """The index of each row of the batch within the run, (rows,). Tiles of an image are told apart."""
        if layouts := call.decoder.layouts:
            counts = torch.tensor([layout.rows for layout in layouts], device=device)
            if call.samples is not None:
                check_sample_count(call.samples, len(layouts))
            known = call.samples
            images = self.calls.number_samples(len(layouts), device) if known is None else known.to(device)
            tiles = torch.cat([torch.arange(layout.rows, device=device) for layout in layouts])
            return images.repeat_interleave(counts) + tiles * BETWEEN_TILES
        expand = self.tower.expand_sample_ids
        each = expand(torch.zeros(1), call.context).shape[0]  # a sample may have several images
        if call.samples is not None:
            check_sample_count(call.samples, rows // each)
            return expand(call.samples.to(device), call.context)
        return expand(self.calls.number_samples(rows // each, device), call.context)

    def _cut(self, cut: Cut, x: Tensor, call: Call, state: Pass) -> Tensor:
        """Applies the step's method to the tokens: (B, P+N, D) -> (B, P+K, D)."""
        with self.chooser.plan_work():
            return self._reduce(cut, x, call, state)

    def _reduce(self, cut: Cut, x: Tensor, call: Call, state: Pass) -> Tensor:
        at_head = self._is_at_head(cut)
        step, p = cut.step, 1 if at_head else self.tower.prefix
        n = x.shape[1] - p
        rows = self._row_cuts(cut, x.shape[0], n, call, state)
        if not any(row.cut.acts(row.n, state.first) for row in rows):
            self._record(cut, x.shape[0], n, None, call, state)
            return x
        prefix, tokens = x[:, :p], x[:, p:]
        attention = state.current_attention() if "attention" in step.method.needs else None
        if "attention" in step.method.needs and attention is None:
            raise UserError(f"{step}: the block before it ran without the plan. {LOST}")
        with torch.autocast(x.device.type, enabled=False):  # scores need full precision
            text, image_embeds = self._text(cut, call, tokens)
            view = View(
                tokens=tokens,
                prefix=prefix,
                grid=state.grid if state.has_full_grid and not state.stages else None,
                attention=attention,
                sizes=state.sizes,
                samples=state.samples,
                seed=cut.seed,
                context=call.context,
                part=self.chooser.part(step, tokens.device),
                pooling=self.tower.pooling if not at_head else None,
                place=cut.name,
                question=self._question(cut, call, x.shape[0], state),
                has_cls=at_head or self.tower.has_cls,
                layer=cut.layer,
                depth=self.tower.depth,
                full_depth=self.tower.full_depth,
                earlier={} if step.method.layers is None else state.earlier_attention(),
                pixels=self._pixels(cut, call, n),
                before=None if state.before is None else state.before[:, p:],
                text=text,
                image_embeds=image_embeds,
                carried=state.carried.get(str(step)),
                share=rows[0].cut.share,
            )
            reduction = self._choose(rows, view)
            state.stages.append((cut.name, reduction))
            self._record(cut, x.shape[0], n, reduction, call, state)
            if step.rest == "zero":
                kept = view.sizes_or_ones().gather(1, reduction.index)
                state.sizes = torch.zeros_like(view.sizes_or_ones()).scatter(1, reduction.index, kept)
                return torch.cat([prefix, reduction.zero_fill(tokens)], dim=1)
            state.sizes = reduction.sizes_after(state.sizes)
            if state.sizes is not None and not self._tracks_sizes:
                raise UserError(
                    f"{step}: train() was called while the plan was attached, which loses gradients; call it before apply"
                )
            state.bias = _size_bias(state.sizes, p, reduction)
            state.follow(str(step), reduction)
            if state.before is not None:  # of the same block, for another cut behind it
                state.before = reduction.apply(state.before, p)
            return reduction.apply(x, p)

    def _row_cuts(self, cut: Cut, rows: int, n: int, call: Call, state: Pass) -> list[RowCut]:
        """What each row of a batch of n tokens keeps, without padding; one for all rows, where they are alike."""
        if not cut.is_shared and state.counts is None:
            return [RowCut(cut, n, self.chooser.tokens_to_keep(cut, n, state.first))]
        counts = [n] * rows if state.counts is None else state.counts.tolist()
        cuts = [cut.with_allotted(keep) for keep in self.share(cut, call, counts)] if cut.is_shared else [cut] * rows
        keeps = [self.chooser.tokens_to_keep(own, count, state.first) for own, count in zip(cuts, counts, strict=True)]
        return [RowCut(own, count, keep) for own, count, keep in zip(cuts, counts, keeps, strict=True)]

    def _choose(self, rows: Sequence[RowCut], view: View) -> Reduction:
        """The decision of a step."""
        if len(rows) == 1:
            reduction = self.chooser.choose(rows[0].cut, view, rows[0].keep)
        else:
            reduction = choose_by_rows(self.chooser, rows, view)
        if reduction.soft is not None:
            raise UserError(f"{rows[0].cut.step}: a soft mask works in a decoder only, at @llm.L")
        return reduction

    def _record(self, cut: Cut, rows: int, n: int, reduction: Reduction | None, call: Call, state: Pass) -> None:
        """Adds a cut of n tokens of each row to the ledger. reduction: None if everything is kept."""
        if not call.decoder.layouts:
            state.ledger.append(Row(cut.name, n, n) if reduction is None else Row.of(cut.name, reduction))
            return
        before = [n] * rows if state.counts is None else state.counts.tolist()
        after = before
        if reduction is not None:
            after = [reduction.k] * rows if reduction.counts is None else reduction.counts.tolist()
        images, first = [], 0
        for layout in call.decoder.layouts:
            own = slice(first, first + layout.rows)
            images.append(TileCounts(before[own], after[own]))
            first += layout.rows
        state.ledger.append(row_of_images(cut.name, images))

    def _pixels(self, cut: Cut, call: Call, n: int) -> Tensor | None:
        """The pixels of each patch, (B, N, C p p), if the method needs them."""
        if "pixels" not in cut.step.method.needs:
            return None
        layout = call.layout
        if layout is None or layout.images is None or layout.images.dim() != 4 or layout.n != n:
            raise UserError(
                f"{cut.step}: the pixels of the patches are not known in this model, which makes patches in another way"
            )
        (h, w), images = layout.grid, layout.images
        patch = (images.shape[2] // h, images.shape[3] // w)
        return F.unfold(images[:, :, : h * patch[0], : w * patch[1]], patch, stride=patch).transpose(1, 2)

    def _text(self, cut: Cut, call: Call, tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The embeddings of the text that the caller gave, (B, M, E), and the tokens in their space, (B, N, E)."""
        if "text" not in cut.step.method.needs or (cut.part == "out" and call.decoder.prompt is not None):
            return None, None  # a language model has its own text
        text = call.context.get("text")
        if not isinstance(text, Tensor) or text.dim() not in (2, 3) or text.shape[0] not in (1, len(tokens)):
            raise UserError(
                f"{cut.step}: {cut.step.method.name} needs the text of each image; give its embeddings, (B, E) or (B, M, E): "
                'with handle.call(context={"text": model.encode_text(texts)}): ...'
            )
        text = text[:, None] if text.dim() == 2 else text
        embeds = call.context.get("image_embeds")
        if embeds is None:
            embeds = tokens if self._is_at_head(cut) else self.tower.project(tokens)
        if embeds.shape[:2] != tokens.shape[:2] or embeds.shape[2] != text.shape[2]:
            raise UserError(
                f"{cut.step}: the tokens have {tuple(embeds.shape)} entries in the space of the text, which has "
                f"{tuple(text.shape)}; give the embeddings of the tower's own text model"
            )
        return text.to(tokens.device).expand(len(tokens), -1, -1), embeds

    def _question(self, cut: Cut, call: Call, images: int, state: Pass) -> Question | None:
        if self.question is None or "question" not in cut.step.method.needs:
            return None
        h, w = self._full_grid(call) or state.grid or self.tower.grid
        return self.question(call, [h * w] * images)


def _check_unwrapped(block: Block, number: int) -> None:
    """Raises a UserError if the forward of a block that is run in two halves, or of its attention, would be skipped."""
    try:
        check_attention(block.attention)
        check_own(block.module, "forward")
    except UserError as error:
        raise UserError(f"block {number} is run in two halves, but {error}") from None


def _size_bias(sizes: Tensor | None, prefix: int, reduction: Reduction) -> Tensor | None:
    """What later attention adds to the logits of keys, (B, 1, 1, P+K): log of the sizes (B, K). Padding is hidden."""
    if sizes is None:
        return None
    if not reduction.prop_attn:
        if reduction.counts is None:
            return None
        sizes = (sizes > 0).float()
    return F.pad(sizes.log(), (prefix, 0))[:, None, None]


def _blocks_to_record(cuts: Sequence[Cut], depth: int) -> set[int]:
    """The numbers of the blocks whose attention methods want to see at a later cut."""
    wanted = {
        (number, cut.layer) for cut in cuts if cut.step.method.layers is not None for number in cut.step.method.layers(depth)
    }
    return {number for number, at in wanted if 1 <= number <= at}
