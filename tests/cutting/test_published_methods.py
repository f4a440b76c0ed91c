"""Every published method runs as its authors place it: batches as single images, no bad number, the model as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokensieve
from tests.support import vlm_models
from tests.support.vlm_models import in_float64, single
from tokensieve.errors import UserError
from tokensieve.methods.registry import REGISTRY
from tokensieve.plan import Step
from tokensieve.testing.tiny_models import open_clip_model, timm_model

pytestmark = pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")

PUBLISHED = sorted(name for name, method in REGISTRY.items() if method.paper and method.part is None)
IN_DECODER = [name for name in PUBLISHED if Step(REGISTRY[name]).resolved_where(4, 6).part == "llm"]
IN_TOWER = [name for name in PUBLISHED if Step(REGISTRY[name]).resolved_where(3, 0).part != "llm"]
SMALL = {
    "diffrate": ":-2",
    "visionzip": ":9",
    "prunesid": ":9",
    "scope": ":6",
    "hiprune": ":10",
    "vispruner": ":8",
    "mmtok": ":6",
    "cdpruner": ":6",
}


def test_every_published_method_is_tried() -> None:
    assert len(PUBLISHED) >= 40
    assert set(IN_TOWER) | set(IN_DECODER) == set(PUBLISHED)


def clip_and_images() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model: Any = open_clip_model(layers=4).double().eval()
    return model, torch.randn(3, 3, 32, 32, dtype=torch.float64)


@pytest.mark.parametrize("name", IN_TOWER)
def test_in_a_tower(name: str) -> None:
    model, images = clip_and_images()
    text = torch.randn(3, 16, dtype=torch.float64)
    with torch.no_grad():
        stock = model.encode_image(images)
        with tokensieve.apply(model, f"{name}{SMALL.get(name, '')}") as handle:
            with handle.call(context={"text": text}, samples=torch.arange(3)):
                together = model.encode_image(images)
            assert handle.ledger
            alone = []
            for i in range(3):
                with handle.call(context={"text": text[i : i + 1]}, samples=torch.tensor([i])):
                    alone.append(model.encode_image(images[i : i + 1]))
        assert torch.equal(model.encode_image(images), stock)
    assert together.isfinite().all()
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_in_a_language_model(name: str) -> None:
    """At its own place, or if that is a tower, at the output or inside of the tower of a LLaVA."""
    # dart ranks rotated keys by their sum, which changes with the position: padding moves a prompt
    words = (6, 6) if name == "dart" else (4, 7)
    model, batch = in_float64(vlm_models.llava(), vlm_models.prompts((1, 1), words))
    with torch.no_grad():
        stock = model(**batch).logits
        try:
            handle = tokensieve.apply(model, f"{name}{SMALL.get(name, '')}")
        except UserError as error:
            pytest.fail(f"{name}: {error}")
        with handle:
            with handle.call(samples=torch.arange(2)):
                together = model(**batch).logits[:, -1]
            assert handle.ledger
            alone = []
            for row in range(2):
                with handle.call(samples=torch.tensor([row])):
                    alone.append(model(**single(batch, row, row)).logits[:, -1])
        assert torch.equal(model(**batch).logits, stock)
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-4)


def test_flowcut_counts_the_blocks_that_a_llava_does_not_run() -> None:
    """Of 4 blocks it runs 3; the authors' count (left = 4 - 2 - i - 1) ends behind the second, and leaves out the first."""
    model = vlm_models.llava(layer=-2)
    with torch.no_grad(), tokensieve.apply(model, "flowcut:9") as handle:
        model(**vlm_models.prompts())
        assert [(row.layer, row.tokens_out) for row in handle.ledger] == [("1", 36), ("2", 9), ("3", 9)]


@pytest.mark.parametrize("name", IN_TOWER)
def test_in_16_bits_and_without_cls(name: str) -> None:
    torch.manual_seed(0)
    model: Any = timm_model(class_token=False, global_pool="avg", depth=4).bfloat16().eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)
    if "text" in REGISTRY[name].needs:
        return  # there is no text tower
    with torch.no_grad(), tokensieve.apply(model, f"{name}{SMALL.get(name, '')}"):
        assert model(images).isfinite().all()
