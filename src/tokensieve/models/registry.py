"""Opening a model of any declared family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from tokensieve.errors import Uncuttable
from tokensieve.models import vlm
from tokensieve.models.families import FAMILIES, Family
from tokensieve.models.wrapped import unwrap
from tokensieve.registry import resolve

if TYPE_CHECKING:
    from tokensieve.models.tower import Tower
    from tokensieve.models.vlm import Vlm


def families() -> list[Family]:
    """All families in the order in which they are tried."""
    return sorted(FAMILIES.values(), key=lambda family: family.order)


def open_tower(model: nn.Module) -> Tower:
    """The vision tower of a model of any known family; Uncuttable, with the reason, where there is none."""
    model = unwrap(model)
    for family in families():
        tower: Tower | None = resolve(family.open_tower)(model)
        if tower is not None:
            return tower
    known = "; ".join(family.description for family in families() if family.description)
    raise Uncuttable(f"{type(model).__name__} is of no family that can be cut; known are {known}")


def open_vlm(model: nn.Module) -> Vlm | None:
    """The parts of a vision-language model; None if it is none that is known."""
    return vlm.open_vlm(unwrap(model))
