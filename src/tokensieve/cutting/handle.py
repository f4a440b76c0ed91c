"""apply(model, plan): the model runs on fewer tokens until the handle is removed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from pathlib import Path
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tokensieve.core import Reduction
from tokensieve.cutting.choice import Chooser, Observer
from tokensieve.cutting.decoder import DecoderCuts
from tokensieve.cutting.packed_tower import PackedCuts
from tokensieve.cutting.passes import CallOptions, Calls, Pass, Row, TiledRow
from tokensieve.cutting.placement import (
    Cut,
    ResizedTower,
    check_token_counts,
    leave_feature,
    place_plan,
    resize_image,
    resize_tower,
)
from tokensieve.cutting.tower import TowerCuts
from tokensieve.errors import PlanWarning, Uncuttable, UserError, describe_value
from tokensieve.installation.packages import naming_extras
from tokensieve.models.image_grid import TokenGrid
from tokensieve.models.registry import open_tower, open_vlm
from tokensieve.models.tower import Tower, Undo
from tokensieve.models.vlm import Vlm
from tokensieve.parts.protocol import Weights
from tokensieve.parts.resolve import load_parts
from tokensieve.plan import Plan, as_plan

if TYPE_CHECKING:
    from tokensieve.drawing.sheet import Picture

_attaching = threading.RLock()  # held while a plan is attached or removed


class Handle:
    """A plan attached to a model: a context manager, and a record of the last forward pass. Returned by `apply`.

    The model is changed in place while the handle is attached. `remove()`, or the end of the `with` block, restores it
    exactly. `ledger`, `kept`, `groups`, `stages` and `reduction` describe the last forward pass of the calling thread; they
    are empty before the first pass and after one that failed.

    Several threads may call the model at the same time, and a model may be called inside one of its own hooks: no state of
    a call is stored on the handle or the model. Attach and remove a plan while no other thread runs the model.

    Example:
        >>> with tokensieve.apply(model, "anchor@6(k=10,m=50)") as handle:
        ...     features = model.encode_image(images)
        >>> handle.ledger
        [Row(layer='6', tokens_in=196, tokens_out=60)]
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        seed: int = 0,
        context: Mapping[str, Any] | None = None,
        parts: Mapping[str, nn.Module] | nn.ModuleDict | None = None,
        check_finite: bool = True,
    ) -> None:
        self.plan = plan
        self.parts: dict[str, nn.Module] = dict(parts.items()) if parts else {}  # by method name
        self._calls = Calls(dict(context or {}))
        self._chooser = Chooser(self.parts, check_finite)
        self._undo: list[Undo] = []
        self._open_tower: Tower | None = None
        self.excess: list[str] = []  # about steps that keep more tokens than they say, by the shape of the model
        self.leaves_feature = False  # the plan changes output tokens only, and not the image feature
        self._tower: TowerCuts | None = None
        self._decoder: DecoderCuts | None = None
        if not plan.is_identity:
            self._open(model, seed)

    def _open(self, model: nn.Module, seed: int) -> None:
        """Opens the model and finds the positions of the plan in it."""
        vlm = open_vlm(model)
        tower = open_tower(model) if vlm is None else vlm.tower or vlm.tile_tower
        flexible = vlm is not None and vlm.images is not None
        resized = None if flexible else self._resize(tower, "" if vlm is None else vlm.no_resize_reason)
        if resized is not None:
            tower = resized.tower
        packed = None if vlm is None else vlm.packed_tower
        if tower is None and packed is None and vlm is not None:
            for step in self.plan.token_steps:
                if step.resolved_where(0, vlm.decoder.depth).part not in ("llm", "out" if vlm.out_is_projected else "llm"):
                    raise Uncuttable(f"{step}: {vlm.reason}")
        is_projected = vlm is not None and vlm.out_is_projected
        has_tiles, decoder = vlm is not None and vlm.tile_tower is not None, None if vlm is None else vlm.decoder.depth
        cuts = place_plan(self.plan, tower, seed, decoder, self.parts, is_projected, has_tiles, packed)
        projected = [cut for cut in cuts if cut.part == "out" and is_projected]
        in_tower = [cut for cut in cuts if cut.part != "llm" and cut not in projected]
        if tower is not None:
            for cut in in_tower if tower.no_blocks_reason else ():
                if cut.step.where.part != "out":
                    raise Uncuttable(f"{cut.step}: {tower.no_blocks_reason}; cut @out")
            tower.check()
            notes = check_token_counts(in_tower if has_tiles else cuts, tower, self.parts)
            self.excess = notes.excess
            for note in (*notes.excess, *notes.others):
                self._chooser.notes.add(note)
            is_full_size = resized is None or resized.full_grid == tower.grid
            self.leaves_feature = vlm is None and is_full_size and leave_feature(cuts, tower)
            question = None if vlm is None else self._question
            self._tower = TowerCuts(tower, in_tower, self._chooser, self._calls, question, self._share, resized)
        self._open_tower = tower
        if vlm is not None:
            self._open_decoder(vlm, cuts, in_tower, projected)

    def _resize(self, tower: Tower | None, reason: str) -> ResizedTower | None:
        """The tower with the images that the plan makes smaller; None if it does not. reason: why there is no tower."""
        step = self.plan.image_step
        if step is None:
            return None
        if tower is None or tower.resize is None:
            raise Uncuttable(f"{step}: {reason if tower is None else tower.no_resize_reason}")
        resized, notes = resize_tower(step, tower)
        for note in notes:
            self._chooser.notes.add(note)
        return resized

    def _open_decoder(self, vlm: Vlm, cuts: list[Cut], in_tower: list[Cut], projected: list[Cut]) -> None:
        arrives_cut = bool(in_tower or projected) or self.plan.image_step is not None
        layers: dict[int, list[Cut]] = {0: []} if arrives_cut else {}
        for cut in cuts:
            if cut.part == "llm":
                layers.setdefault(cut.layer, []).append(cut)
        vlm.decoder.check(0)
        if not vlm.decoder.takes_bias and any(self._chooser.makes_sizes(cut.step) for cut in cuts):
            self._chooser.notes.add(
                f"{self.plan}: {vlm.decoder.implementation} does not support an attention bias, so token sizes are ignored in "
                'the decoder. Use attn_implementation="sdpa" to weight merged tokens by size'
            )
        if cuts and cuts[-1].step.rest == "zero":
            raise UserError(f"{cuts[-1].step}: with rest=zero the decoder would read empty tokens; use rest=drop")
        step, packed = self.plan.image_step, None
        if vlm.packed_tower is not None and in_tower:
            packed = PackedCuts(vlm.packed_tower, in_tower, self._chooser, self._calls)
        resize = None if step is None or vlm.images is None else partial(resize_image, step)
        self._decoder = DecoderCuts(
            vlm, layers, self._tower, self._chooser, self._calls, str(self.plan), resize, projected, packed
        )

    def _question(self, call: Any, lengths: Sequence[int]) -> Any:
        return None if self._decoder is None else self._decoder.question_about(call, lengths)

    def _share(self, cut: Cut, call: Any, counts: Sequence[int]) -> list[int]:
        assert self._decoder is not None  # place_plan
        return self._decoder.share(cut, call, counts)

    def __repr__(self) -> str:
        """In one line: the plan, whether it is attached, and the tokens before the first and after the last cut."""
        ledger, state = self.ledger, "attached" if self.is_attached else "not attached"
        tokens = f", {ledger[0].tokens_in} -> {ledger[-1].tokens_out} tokens" if ledger else ""
        return f"Handle({str(self.plan)!r}, {state}{tokens})"

    def __str__(self) -> str:
        """The plan, the tokens at each cut of the last forward pass, and notes, each on a line of its own."""
        state = "attached" if self.is_attached else "not attached"
        ledger = self.ledger
        width = max((len(row.layer) for row in ledger), default=0)
        cuts = [f"  @{row.layer:<{width}}  {row.tokens_in} -> {row.tokens_out} tokens{_tiles(row)}" for row in ledger]
        if not cuts:
            cuts = ["  nothing to cut" if self.plan.is_identity else "  no forward pass yet"]
        return "\n".join([f"{self.plan} ({state})", *cuts, *(f"  note: {note}" for note in self.notes)])

    # --- attach and remove --------------------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Whether the plan is attached to the model."""
        return bool(self._undo)

    def attach(self) -> Handle:
        """Attaches the plan to the model. Does nothing if it is attached; raises a UserError if another plan is."""
        with _attaching:
            if self._undo or self.plan.is_identity:
                return self
            if any(cuts is not None and cuts.has_plan for cuts in (self._tower, self._decoder)):
                raise UserError("another plan is attached to this model; remove() its handle first")
            undo: list[Undo] = []
            try:
                for cuts in (self._tower, self._decoder):
                    if cuts is not None:
                        cuts.attach(undo)
            except BaseException:
                _undo_all(undo)
                raise
            self._undo = undo
        return self

    def remove(self) -> None:
        """Removes the plan from the model. The model is then exactly as before."""
        with _attaching:
            _undo_all(self._undo)

    def __enter__(self) -> Handle:
        return self.attach()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def call(self, *, samples: Tensor | None = None, context: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
        """Sets options for the calls of the model inside the `with` block, in this thread or asyncio task only.

        Args:
            samples: (B,), the index of each sample of the batch within the run. Random choices depend on it and not on
                how samples are batched. By default each thread counts its samples from 0.
            context: more entries of `view.context` for methods that need them, such as {"question": mask}.

        Example:
            >>> with handle.call(samples=torch.arange(64, 128)):
            ...     features = model.encode_image(images)
        """
        return self._calls.options(CallOptions(samples, context))

    @property
    def samples(self) -> Tensor | None:
        """The index of each image of the last pass within the run, (B,). Set with `call`."""
        return None if self._pass is None else self._pass.samples

    @samples.setter
    def samples(self, samples: Tensor | None) -> None:
        raise UserError("sample indices are set for a call: with handle.call(samples=...): model(...)")

    @property
    def observer(self) -> Observer | None:
        """Measures the work that the plan adds; None: nothing is measured."""
        return self._chooser.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        if observer is not None and not isinstance(observer, Observer):
            raise UserError(
                f"an observer has the methods plan_work and model_work, or it is None; got {describe_value(observer)}"
            )
        self._chooser.observer = observer

    def restart(self) -> None:
        """Clears the record of this thread's last pass, and counts its samples from 0 again."""
        self._calls.forget()

    # --- the last forward pass ----------------------------------------------------------------------------------

    @property
    def _pass(self) -> Pass | None:
        call = self._calls.recorded
        return None if call is None else call.tower

    @property
    def notes(self) -> list[str]:
        """What the plan does not do on this model, or has not done with the images so far."""
        return self._chooser.notes.to_list()

    @property
    def ledger(self) -> list[Row]:
        """Patch tokens in and out at each cut."""
        return list(self._pass.ledger) if self._pass else []

    @property
    def has_cut(self) -> bool:
        """Whether the last pass ran on fewer tokens than the full model."""
        return any(row.tokens_out < row.tokens_in for row in self.ledger)

    @property
    def reduction(self) -> Reduction | None:
        """All cuts as one reduction of the original patches.

        None if nothing was cut, if patch dropout (in training) left an incomplete grid, or if images had different numbers
        of tokens.
        """
        state = self._pass
        if state is None or not state.has_full_grid or not state.stages or state.is_uneven:
            return None
        return reduce(Reduction.then, (reduction for _, reduction in state.stages))

    @property
    def stages(self) -> list[tuple[str, Reduction]]:
        """Every cut that removed tokens: its position, and the reduction of the tokens that arrived there."""
        return list(self._pass.stages) if self._pass else []

    @property
    def soft(self) -> list[tuple[str, Reduction]]:
        """Every cut with a soft mask: its position, and the reduction with the keep probabilities."""
        return list(self._pass.soft) if self._pass else []

    @property
    def kept(self) -> Tensor | None:
        """Raster indices of the kept patches, (B, K); of merged tokens, their representatives. Padding, where images are left
        with different numbers of tokens, is -1."""
        total = self.reduction
        if total is None or total.counts is None:
            return None if total is None else total.index
        return total.index.masked_fill(~total.is_real(), -1)

    @property
    def groups(self) -> Tensor | None:
        """The output token of each patch, (B, N); -1 where it was dropped."""
        total = self.reduction
        return None if total is None else total.groups

    @property
    def grid(self) -> tuple[int, int] | None:
        """(h, w) of the patches; before any pass the configured one; None if unknown or different between images."""
        return self._pass.grid if self._pass else self._open_tower.grid if self._open_tower else None

    def token_grid(self, batch_index: int = 0) -> TokenGrid | None:
        """Where the tokens of an image or video of the last batch lie in it, for models that take images of any size, or tiles
        of them. Videos are counted after all images.

        None: as in the grid of the tower.
        """
        return self._pass.layouts[batch_index].drawn if self._pass and self._pass.layouts else None

    def picture(
        self, image: Any, batch_index: int = 0, transform: Callable[[Any], Any] | None = None, name: str = ""
    ) -> Picture:
        """Draws what the plan did to an image of the last batch, as a matplotlib figure; see `drawing.sheet.picture`."""
        with naming_extras():
            from tokensieve.drawing import sheet

        return sheet.picture(self, image, batch_index, transform, name)


def _tiles(row: Row) -> str:
    """What a line of the ledger says about tiles."""
    if not isinstance(row, TiledRow):
        return ""
    least, most = row.least_of_tile, row.most_of_tile
    return f", {least} of each" * (least == most) + f", {least} to {most} of each" * (least < most) + f" of {row.tiles} tiles"


def _undo_all(undo: list[Undo]) -> None:
    while undo:
        undo.pop()()


def apply(
    model: nn.Module,
    plan: Plan | str,
    *,
    seed: int = 0,
    context: Mapping[str, Any] | None = None,
    weights: Weights = None,
    check_finite: bool = True,
) -> Handle:
    """Attaches a plan to a model, in place, until `handle.remove()` or the end of `with apply(...)`.

    Whether the plan fits the model is checked here, before any image: the layers exist, the tower has what the methods
    need, and every budget leaves tokens. Weights, state_dict keys and the model's own API stay the same. A model has one
    plan at a time.

    Args:
        model: an open_clip, Hugging Face or timm vision model, a vision-language model, or a re-identification model.
        plan: for example "anchor@6(k=10,m=50,alpha=0.5)", or "none".
        seed: seed of random choices.
        context: entries of `view.context` for methods that need them.
        weights: the trained parts of methods: a file, a folder, a Hub id, a list of them, or modules by method name. By
            default, those included for this model.
        check_finite: raise an error if tokens or scores contain NaN or infinity. Compiled and exported graphs skip the
            check.

    Returns:
        The attached handle.

    Raises:
        UserError: the plan cannot be parsed or does not fit the model, or another plan is attached.

    Example:
        >>> with tokensieve.apply(model, "anchor@6:60(rest=merge)") as handle:
        ...     features = model.encode_image(images)
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"apply needs a model, a torch.nn.Module, not {describe_value(model)}")
    plan = as_plan(plan)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UserError(f"seed is a whole number, not {describe_value(seed)}")
    if context is not None and not isinstance(context, Mapping):
        raise UserError(f"context is a mapping of names to values, not {describe_value(context)}")
    sources = weights if isinstance(weights, (list, tuple, Mapping)) else ()
    if not isinstance(weights, (str, Path, list, tuple, Mapping, NoneType)) or not all(
        isinstance(source, (str, Path)) for source in sources
    ):
        raise UserError(
            f"weights are a file, a folder, an id on the Hub, several of them or modules, not {describe_value(weights)}"
        )
    handle = Handle(model, plan, seed, context, load_parts(plan, model, weights), check_finite)
    for note in handle.notes:
        warnings.warn(note, PlanWarning, stacklevel=2)
    return handle.attach()
