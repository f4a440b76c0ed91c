"""A family is declared once, and opening, encoding and messages go through the declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tokensieve.errors import Uncuttable, UserError
from tokensieve.models import timm
from tokensieve.models.families import FAMILIES, VLM_FAMILIES, Family
from tokensieve.models.features import encode_image
from tokensieve.models.registry import families, open_tower
from tokensieve.models.tower import Tower
from tokensieve.registry import resolve
from tokensieve.testing.tiny_models import timm_model


class Wrapped(nn.Module):
    """A model of no library: it holds a timm tower, and scales its feature."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = timm_model()

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.trunk(images)
        return 2 * features


def open_wrapped(model: Any) -> Tower | None:
    return timm.open_tower(model.trunk) if isinstance(model, Wrapped) else None


def encode_wrapped(model: Any, unscaled: bool) -> Callable[[Tensor], Tensor] | None:
    return model if isinstance(model, Wrapped) else None


@pytest.fixture
def wrapped() -> Iterator[Wrapped]:
    FAMILIES.add(Family("wrapped", "wrapped towers", f"{__name__}:open_wrapped", f"{__name__}:encode_wrapped"))
    yield Wrapped().eval()
    del FAMILIES._declared["wrapped"]


def test_declarations_are_whole() -> None:
    for family in FAMILIES.values():
        assert all(callable(resolve(name)) for name in (family.open_tower, family.encoder) if name)
        assert all(callable(resolve(example.build)) for example in family.examples)
    assert all(callable(resolve(family.example.build)) for family in VLM_FAMILIES.values())
    assert [family.name for family in families()] == ["reid", "vlm", "open_clip", "timm", "hf"]


@torch.no_grad()
def test_a_family_of_a_plug_in_is_opened_cut_and_encoded(wrapped: Wrapped) -> None:
    assert open_tower(wrapped).family == "timm VisionTransformer" and families()[0].order == 0
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(encode_image(wrapped, images), wrapped(images))
    with tokensieve.apply(wrapped, "grid@1:5") as handle:
        cut = encode_image(wrapped, images)
    assert handle.ledger[0].tokens_out == 5 and not torch.equal(cut, wrapped(images))


def test_a_model_of_no_family_lists_them() -> None:
    with pytest.raises(Uncuttable, match=r"re-identification models; .*open_clip models .*; timm .*; Hugging Face"):
        open_tower(nn.Linear(2, 2))
    with pytest.raises(UserError, match="Wrapped does not encode images to features; known are open_clip"):
        encode_image(Wrapped(), torch.zeros(1, 3, 32, 32))
