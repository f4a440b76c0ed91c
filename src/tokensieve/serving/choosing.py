"""Which tokens of an image stay, decided for a batch of images, and remembered by the hash of the image.

An image may be encoded again, in another batch, while the tokens that its first encoding left are still in the prefix cache.
Rounding differs between batches, and a near-tie could go the other way: so the first decision holds.

What a tower makes of an image need not be finite. An exception here would end the server, so methods see other numbers in place
of NaN and infinity, and such an image keeps some tokens or others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.cutting.choice import LARGEST, Chooser
from tokensieve.scoring import Attention
from tokensieve.serving.served_plan import ServedPlan

REMEMBERED = 128 << 20  # bytes of reductions
OBJECTS = 2 << 10  # bytes of a reduction, besides the data of its tensors
MAX_HASH = (1 << 62) - 1
INDICES = (torch.int16, torch.int32, torch.int64)  # the first that is large enough for the number of tokens

Key = tuple[int, int]  # the hash of an image, and its number of tokens


class ImageCutter:
    """Cuts the tokens of images by a plan."""

    def __init__(self, plan: ServedPlan, remembered: int = REMEMBERED) -> None:
        self.plan, self.remembered = plan, remembered
        self._chooser = Chooser({}, check_finite=False)
        self._known: OrderedDict[Key, Reduction] = OrderedDict()
        self._bytes = 0

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
        seen = finite(tokens)
        view = View(
            tokens=seen,
            prefix=seen[:, :0] if prefix is None else finite(prefix),
            grid=grid,
            attention=None if attention is None else _finite_attention(attention),
            samples=samples,
            seed=cut.seed,
            place=cut.name,
            layer=cut.layer,
            depth=self.plan.depth,
            earlier={number: _finite_attention(each) for number, each in (earlier or {}).items()},
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

    def _recall(self, key: Key) -> Reduction | None:
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def _remember(self, key: Key, reduction: Reduction) -> None:
        if key in self._known:  # twice in one batch
            self._bytes -= size_of(self._known.pop(key))
        self._known[key] = reduction
        self._bytes += size_of(reduction)
        while self._bytes > self.remembered:
            self._bytes -= size_of(self._known.popitem(last=False)[1])


def finite(x: Tensor) -> Tensor:
    """The same numbers, with 0 for NaN, and none so large that distances would be infinite."""
    largest = min(LARGEST, torch.finfo(x.dtype).max)
    return x.nan_to_num(0.0, largest, -largest).clamp(-largest, largest)


def _finite_attention(attention: Attention) -> Attention:
    values = None if attention.v is None else finite(attention.v)
    return replace(attention, queries=finite(attention.q), k=finite(attention.k), v=values)


def size_of(reduction: Reduction) -> int:
    """The bytes of a reduction that is remembered."""
    tensors = [value for value in vars(reduction).values() if isinstance(value, Tensor)]
    return OBJECTS + sum(each.numel() * each.element_size() for each in tensors)


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
    """What `apply` needs of one image, (1, K), on the CPU, with small integers."""
    one = replace(reduction, scores=None, anchors=None, gate=None, carry=None, sizes=None)
    small = next(kind for kind in INDICES if reduction.n <= torch.iinfo(kind).max)
    tensors = {name: value[row : row + 1] for name, value in vars(one).items() if isinstance(value, Tensor)}
    kinds = {name: value.dtype if value.is_floating_point() else small for name, value in tensors.items()}
    return replace(one, **{name: value.to("cpu", kinds[name], copy=True) for name, value in tensors.items()})  # type: ignore[arg-type]


def _join(images: Sequence[Reduction], device: torch.device) -> Reduction:
    """The reductions (1, K) of single images as one of a batch."""
    names = [name for name, value in vars(images[0]).items() if isinstance(value, Tensor)]
    joined = {name: torch.cat([getattr(each, name) for each in images]).to(device) for name in names}
    wide = {name: value if value.is_floating_point() else value.long() for name, value in joined.items()}
    return replace(images[0], **wide)  # type: ignore[arg-type]
