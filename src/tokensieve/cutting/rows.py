"""The decision of a step about a batch of a tower whose rows keep different numbers of tokens.

Rows are left with different numbers of tokens by methods that decide how many, and by budgets that tiles or images share. The
shorter ones are padded. A budget counts a row's own tokens, and a method sees rows of one length without padding, so an image
gets the same result in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.cutting.choice import Chooser
from tokensieve.cutting.placement import Cut


class RowCut(NamedTuple):
    """What one row of the batch keeps."""

    cut: Cut
    n: int  # its tokens, without padding
    keep: int


def choose_by_rows(chooser: Chooser, rows: Sequence[RowCut], view: View) -> Reduction:
    """The decision about each row, for its own number of tokens, as one of the batch. Rows with equal numbers pass together."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(rows):
        alike.setdefault((row.n, row.keep), []).append(number)
    chosen: dict[int, Reduction] = {}
    for (n, keep), numbers in alike.items():
        own = _without_padding(view, torch.tensor(numbers, device=view.tokens.device), n)
        made = _choose(chooser, rows[numbers[0]].cut, own, keep, numbers)
        if len(alike) == 1:
            return made
        made = replace(made, sizes=made.sizes_after(own.sizes))
        each = torch.arange(len(numbers), device=view.tokens.device).split(1)
        chosen |= {number: made.select_images(at) for number, at in zip(numbers, each, strict=True)}
    return Reduction.stack([chosen[number] for number in range(len(rows))])


def _choose(chooser: Chooser, cut: Cut, view: View, keep: int, numbers: Sequence[int]) -> Reduction:
    if keep < view.n or cut.step.method.adaptive:
        return chooser.choose(cut, view, keep, numbers)
    every = torch.arange(view.n, device=view.tokens.device)
    return Reduction(every.expand(len(numbers), -1), view.n)


def _without_padding(view: View, index: Tensor, n: int) -> View:
    """The rows of a view of a tower at index (G,), of which all have n tokens: (G, n, D)."""

    def of_tokens(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[index, :n]

    return replace(
        view,
        tokens=view.tokens[index, :n],
        prefix=view.prefix[index],
        grid=view.grid if n == view.n else None,
        attention=None if view.attention is None else view.attention.select_images(index, n),
        sizes=of_tokens(view.sizes),
        samples=None if view.samples is None else view.samples[index],
        question=None if view.question is None else view.question.rows(index),
        earlier={number: attention.select_images(index, n) for number, attention in view.earlier.items()},
        before=of_tokens(view.before),
        pixels=of_tokens(view.pixels),
        text=None if view.text is None else view.text[index],
        image_embeds=of_tokens(view.image_embeds),
        carried=of_tokens(view.carried),
    )
