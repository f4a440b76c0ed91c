"""Which tokens of an image stay, decided for a batch of images, and remembered by the hash of the image.

An image may be encoded again, in another batch, while the tokens that its first encoding left are still in the prefix cache.
Rounding differs between batches, and a near-tie could go the other way: so the first decision holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.cutting.choice import Chooser
from tokensieve.scoring import Attention
from tokensieve.serving.served_plan import ServedPlan

REMEMBERED = 1 << 14  # images; the reduction of one takes up to some kilobytes
MAX_HASH = (1 << 62) - 1


class ImageCutter:
    """Cuts the tokens of images by a plan."""

    def __init__(self, plan: ServedPlan, remembered: int = REMEMBERED) -> None:
        self.plan, self.remembered = plan, remembered
        self._chooser = Chooser({}, check_finite=False)  # an exception here would end the server
        self._known: OrderedDict[tuple[int, int], Reduction] = OrderedDict()  # by hash and number of tokens

    def choose(
        self,
        tokens: Tensor,
        hashes: Sequence[int],
        *,
        prefix: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        attention: Attention | None = None,
        earlier: Mapping[int, Attention] | None = None,
    ) -> Reduction:
        """What stays of the tokens (B, N, D) of images with these hashes, (B, K), in raster order.

        prefix: (B, P, D), CLS. attention, earlier: of the tower, for methods that need it.
        """
        n = tokens.shape[1]
        known = [self._recall((each, n)) for each in hashes]
        if all(each is not None for each in known):
            return _join([each for each in known if each is not None], tokens.device)
        cut = self.plan.cut
        samples = torch.tensor([each & MAX_HASH for each in hashes], device=tokens.device)
        view = View(
            tokens=tokens,
            prefix=tokens[:, :0] if prefix is None else prefix,
            grid=grid,
            attention=attention,
            samples=samples,
            seed=cut.seed,
            place=cut.name,
            layer=cut.layer,
            depth=self.plan.depth,
            earlier=earlier or {},
        )
        made = in_raster_order(self._chooser.choose(cut, view, cut.count(n)) if cut.acts(n) else _everything(tokens))
        if made.k != self.plan.kept(n):
            raise RuntimeError(f"{self.plan.text} left {made.k} tokens of {n}, not {self.plan.kept(n)}")
        rows = []
        for row, (each, before) in enumerate(zip(hashes, known, strict=True)):
            if before is None:
                before = _to_remember(made, row)
                self._remember((each, n), before)
            rows.append(before)
        return _join(rows, tokens.device)

    def _recall(self, key: tuple[int, int]) -> Reduction | None:
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def _remember(self, key: tuple[int, int], reduction: Reduction) -> None:
        self._known[key] = reduction
        if len(self._known) > self.remembered:
            self._known.popitem(last=False)


def in_raster_order(reduction: Reduction) -> Reduction:
    """The same output tokens in the order of the tokens that represent them, which is that of their positions."""
    index, order = reduction.index.sort(dim=1, stable=True)
    if torch.equal(index, reduction.index):
        return reduction
    places = torch.empty_like(order).scatter_(1, order, torch.arange(reduction.k, device=order.device).expand_as(order))
    assigned, weight = reduction.assigned, reduction.weight
    if assigned is not None:
        assigned = torch.where(assigned < 0, assigned, places.gather(1, assigned.clamp_min(0)))
    if weight is not None:
        weight = weight.gather(1, order[..., None].expand_as(weight))
    sizes = None if reduction.sizes is None else reduction.sizes.gather(1, order)
    return replace(reduction, index=index, assigned=assigned, weight=weight, sizes=sizes)


def _everything(tokens: Tensor) -> Reduction:
    n = tokens.shape[1]
    return Reduction(torch.arange(n, device=tokens.device).expand(len(tokens), -1), n)


def _to_remember(reduction: Reduction, row: int) -> Reduction:
    """What `apply` needs of one image, (1, K), on the CPU."""
    one = replace(reduction, scores=None, anchors=None, gate=None, carry=None, sizes=None)
    tensors = {name: value[row : row + 1] for name, value in vars(one).items() if isinstance(value, Tensor)}
    return replace(one, **{name: value.to("cpu", copy=True) for name, value in tensors.items()})  # type: ignore[arg-type]


def _join(images: Sequence[Reduction], device: torch.device) -> Reduction:
    """The reductions (1, K) of single images as one of a batch."""
    names = [name for name, value in vars(images[0]).items() if isinstance(value, Tensor)]
    joined = {name: torch.cat([getattr(each, name) for each in images]).to(device) for name in names}
    return replace(images[0], **joined)  # type: ignore[arg-type]
