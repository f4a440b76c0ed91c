"""Every method that says it can be an ONNX file is one, and the file gives the model's features."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tokensieve
from tokensieve.exporting import graph, verify
from tokensieve.exporting.encoders import ImageEncoder
from tokensieve.exporting.limits import no_onnx_reason
from tokensieve.methods.registry import Method, get_method, list_methods
from tokensieve.methods.sdtps import Sdtps
from tokensieve.models.registry import open_tower
from tokensieve.parts.signature import token_width
from tokensieve.plan import Plan
from tokensieve.testing import tiny_models
from tokensieve.training.learned_selector.learner import build_part

SIDE, DEPTH = 32, 5  # pixels: 4 x 4 patches; blocks
TOGETHER = DEPTH - 1  # methods of a plan, each behind a block of its own; a CLS feature sees no cut behind the last block
BUDGETS = {"pyramiddrop": "60%", "sdtps": "4"}  # where it is no number of tokens to remove


def exported_methods() -> list[Method]:
    able = [each for each in list_methods() if not each.on_image and each.name != "none" and not no_onnx_reason(each)]
    return sorted(able, key=lambda method: method.layers is not None)  # earlier blocks have run before the last ones


def groups() -> list[str]:
    names = [method.name for method in exported_methods()]
    return [" ".join(names[start : start + TOGETHER]) for start in range(0, len(names), TOGETHER)]


def part_of(method: Method, model: nn.Module, plan: str) -> nn.Module:
    """Its module with random weights."""
    tower = open_tower(model)
    made = Sdtps(token_width(tower), patches=16) if method.name == "sdtps" else build_part(method, tower, [Plan.parse(plan)])
    return made.eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", groups())
def test_every_method_in_onnx(names: str) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, methods = tiny_models.open_clip_model(image_size=SIDE, layers=DEPTH).visual.eval(), names.split()
    places = enumerate(methods, 1 + TOGETHER - len(methods))
    plan = " + ".join(f"{name}@{at}:{BUDGETS.get(name, '-2')}" for at, name in places)
    parts = {name: part_of(get_method(name), model, plan) for name in methods if get_method(name).part is not None}
    with torch.no_grad(), tokensieve.apply(model, plan, weights=parts or None) as handle:
        encoder = ImageEncoder(model).eval()
        content = graph.onnx_file(graph.trace(encoder, torch.randn(2, 3, SIDE, SIDE)), {}, encoder.outputs)
        agreement = verify.compare(verify.run_onnx(content), encoder, handle, (SIDE, SIDE))
    assert all(row.tokens_out < row.tokens_in for row in handle.ledger) and len(handle.ledger) == len(methods)
    assert agreement.difference < 1e-5 and not agreement.other
