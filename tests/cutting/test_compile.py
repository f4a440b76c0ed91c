"""A tower with a plan is one graph for torch.compile and torch.export, and gives the same features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tests.support.rounding import assert_near
from tokensieve.methods.registry import list_methods
from tokensieve.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
IMAGES = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
FREE = [method.name for method in list_methods() if method.part is None and method.name != "none"]
PLANS = [f"{name}@2:8" for name in FREE] + [
    "anchor@2:8(k=3,rest=merge)",
    "random@1.attn:8(rest=fuse)",
    "anchor@out:8(rest=zero)",
]


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "open_clip":
        from open_clip.transformer import VisionTransformer

        return VisionTransformer(image_size=48, patch_size=8, width=32, layers=3, heads=2, mlp_ratio=2, output_dim=16)
    if family == "timm":
        import timm

        sizes: dict[str, Any] = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
        return timm.models.VisionTransformer(**sizes, global_pool="avg", num_classes=0)
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    name = {"hf": "CLIPVision", "hf_rotary": "DINOv3ViT"}[family]
    config = getattr(transformers, f"{name}Config")(**sizes, image_size=48, patch_size=8)
    model: nn.Module = getattr(transformers, f"{name}Model")(config)
    return model


def feature(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.pooler_output


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ["open_clip", "timm", "hf", "hf_rotary"])
def test_compiled_to_one_graph(family: str, plan: str) -> None:
    model = make(family).eval()
    torch._dynamo.reset()
    with torch.no_grad(), tokensieve.apply(model, plan) as handle, handle.call(samples=torch.arange(2)):
        expected, ledger = feature(model(IMAGES)), handle.ledger
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for _ in range(2):  # the second time nothing is compiled again
            assert_near(feature(compiled(IMAGES)), expected, steps=100)
            assert handle.ledger == ledger


@pytest.mark.parametrize("family", ["open_clip", "timm", "hf"])
@pytest.mark.parametrize("plan", ["anchor@2:8(k=3,rest=merge)", "random@2:8"])
def test_exported(family: str, plan: str) -> None:
    model = make(family).eval()
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        with handle.call(samples=torch.arange(2)):
            expected = feature(model(IMAGES))
        program = torch.export.export(model, (IMAGES,))
    with torch.no_grad():
        assert_near(feature(program.module()(IMAGES)), expected, steps=100)


def test_random_choices_of_a_compiled_model_do_not_bake_a_counter_in() -> None:
    """Every batch is numbered from 0 unless numbers are given, which are an input of the graph."""
    model = make("timm").eval()
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad(), tokensieve.apply(model, "random@2:8") as handle:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        first = compiled(IMAGES)
        assert torch.equal(compiled(IMAGES), first) and len(graphs) == 1
        with handle.call(samples=torch.tensor([5, 6])):
            other = compiled(IMAGES)
        with handle.call(samples=torch.tensor([7, 8])):
            assert not torch.equal(compiled(IMAGES), other)
        assert len(graphs) == 2 and not torch.equal(other, first)


def test_finiteness_is_checked_unless_told_otherwise() -> None:
    model = make("timm").eval()
    broken = IMAGES.clone()
    broken[0, 0, 0, 0] = torch.nan
    plan = Plan.parse("random@2:8")
    with torch.no_grad(), tokensieve.apply(model, plan), pytest.raises(tokensieve.UserError, match="NaN"):
        model(broken)
    with torch.no_grad(), tokensieve.apply(model, plan, check_finite=False):
        assert torch.isnan(model(broken)[0]).any() and torch.isfinite(model(broken)[1]).all()
