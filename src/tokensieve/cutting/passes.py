"""TODO docstring."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokensieve.core import Reduction
from tokensieve.cutting.placement import Cut
from tokensieve.scoring import Attention


@dataclass(frozen=True)
class Row:
    """One line of the ledger: patch tokens in and out at one cut."""

    layer: str
    tokens_in: int
    tokens_out: int


@dataclass
class Pass:
    """What one forward pass has done so far."""

    samples: Tensor  # (B,)
    grid: tuple[int, int] | None  # (h, w) of this batch; None: its images have different ones
    whole: bool  # every patch of the raster arrived: no patch dropout
    sizes: Tensor | None = None  # (B, N now)
    bias: Tensor | None = None  # (B, 1, 1, P + N now), log of the sizes
    attention: Attention | None = None  # of the block that runs now, where it was opened
    since: Tensor | None = None  # (B, N now), which of the attention's patches are still there, None: all
    at: Tensor | None = None  # (B, N now), which of the patches that arrived at block 1 stand here, None: all
    ledger: list[Row] = field(default_factory=list)
    stages: list[tuple[str, Reduction]] = field(default_factory=list)  # every cut that cut something
    noted: set[int] = field(default_factory=set)  # seeds of the decoder's cuts that are in the ledger
    uneven: bool = False  # the images had different numbers of tokens in the decoder
    soft: list[tuple[str, Reduction]] = field(default_factory=list)  # every cut that let all go on, with a probability

    def seen(self) -> Attention | None:
        """The attention among the tokens that are there now."""
        if self.attention is None or self.since is None:
            return self.attention
        return self.attention.select(self.since)

    def note(self, cut: Cut, reduction: Reduction, images: Tensor) -> None:
        """A cut inside the decoder, for these images (G,), some of them perhaps several times (beams).

        Where images differ in their number of tokens the first of them are noted; a pass that is run again says nothing new.
        """
        numbers: list[int] = images.tolist()
        once = [numbers.index(number) for number in dict.fromkeys(numbers)]
        self.uneven |= len(once) < len(self.samples)
        if cut.seed in self.noted:
            return
        self.noted.add(cut.seed)
        self.ledger.append(Row(cut.name, reduction.n, reduction.n if reduction.soft is not None else reduction.k))
        if reduction.soft is not None:
            self.soft.append((cut.name, reduction))
        elif reduction.k < reduction.n:
            self.stages.append((cut.name, reduction.select_images(torch.tensor(once, device=images.device))))
