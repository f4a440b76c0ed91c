"""A tower with a plan is one graph for torch.compile and torch.export, and gives the features of eager mode."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tests.support.rounding import assert_near
from tokensieve import UserError
from tokensieve.exporting.limits import no_file_reason
from tokensieve.methods.registry import list_methods
from tokensieve.models.features import encode_image
from tokensieve.testing import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "open_clip": lambda: tiny_models.open_clip_model(layers=2).visual,
    "timm": lambda: tiny_models.timm_model(depth=2, global_pool="avg"),
    "timm Eva": lambda: tiny_models.eva_model(depth=2),
    "CLIP": lambda: tiny_models.hf_model("CLIPVision", num_hidden_layers=2),
    "SigLIP": lambda: tiny_models.hf_model("SiglipVision", num_hidden_layers=2),
    "DINOv2": lambda: tiny_models.hf_model("Dinov2", num_hidden_layers=2),
    "DINOv3": lambda: tiny_models.hf_model("DINOv3ViT", num_hidden_layers=2, num_register_tokens=2),
}
# What is not one graph, and why. Vision-language models and re-identification models are not towers: what they do between
# tower and decoder, or between modalities, depends on values (placeholders, cameras), so they are compiled in pieces.
NOT_ONE_GRAPH = {"SigLIP2": "a tensor (spatial_shapes) states the grid of the images, and a plan needs it as numbers"}

# Methods that need no other input than the image. What cannot be a graph says why (exporting/limits.py).
COMPILED = [method for method in list_methods() if not (method.part or method.on_image or no_file_reason(method))]
OWN = [method.name for method in COMPILED if (not method.paper or method.name == "tome") and method.name != "none"]
PUBLISHED = [method.name for method in COMPILED if method.paper]
EVERY_METHOD = " + ".join(f"{name}@{1 + i % 2}:{14 - 2 * i}" for i, name in enumerate(OWN))
EVERY_REST = "anchor@1:12(k=3,rest=merge) + random@2.attn:9(rest=fuse) + grid@out:6(rest=zero)"
PLANS = {"every method": EVERY_METHOD, "every rest": EVERY_REST}


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


def images(batch: int, size: int = 32) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))


def feature(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.pooler_output


def eager(model: nn.Module, handle: tokensieve.Handle, x: Tensor) -> Tensor:
    """The feature in eager mode, with the samples that a graph counts: from 0 in every batch."""
    with handle.call(samples=torch.arange(len(x))):
        return feature(model(x))


def check_compiled(model: nn.Module, compiled: Callable[[Tensor], Any], handle: tokensieve.Handle, x: Tensor) -> None:
    """The compiled model gives the features of eager mode, and the handle reports the same pass."""
    expected, kept, ledger = eager(model, handle, x), handle.kept, handle.ledger
    handle.restart()
    assert_near(feature(compiled(x)), expected, steps=1000)
    assert handle.ledger == ledger and handle.kept is not None and torch.equal(handle.kept, kept)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_is_compiled_to_one_graph(family: str) -> None:
    model = make(family)
    torch._dynamo.reset()
    with torch.no_grad(), tokensieve.apply(model, EVERY_METHOD) as handle:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        check_compiled(model, compiled, handle, images(2))
        with torch.compiler.set_stance("fail_on_recompile"):
            check_compiled(model, compiled, handle, images(2) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_published_methods_are_one_graph_for_all_batch_sizes(part: int) -> None:
    """A third of them at a time; in float64, so that no near-tie is decided by rounding."""
    budgets = {"pyramiddrop": "60%"}  # a share of the image's first tokens
    plan = " + ".join(f"{name}@{1 + i % 3}:{budgets.get(name, '-4')}" for i, name in enumerate(PUBLISHED[part::3]))
    torch.manual_seed(0)
    model = tiny_models.open_clip_model(layers=3, image_size=64).visual.double().eval()
    torch._dynamo.reset()
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        wanted = {batch: eager(model, handle, images(batch, 64).double()) for batch in (2, 5)}
        assert all(row.tokens_out < row.tokens_in for row in handle.ledger)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        x = images(2, 64).double()
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(compiled(images(5, 64).double()), wanted[5], rtol=0, atol=1e-5)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    with torch.no_grad():
        for batch, expected in wanted.items():
            torch.testing.assert_close(program.module()(images(batch, 64).double()), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_one_graph_for_all_batch_sizes() -> None:
    model = make("timm")
    torch._dynamo.reset()
    with torch.no_grad(), tokensieve.apply(model, "random@1:12 + anchor@2:8(k=3,rest=merge)") as handle:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        for batch in (2, 3, 5):
            x = images(batch)
            torch._dynamo.mark_dynamic(x, 0)
            with torch.compiler.set_stance("default" if batch == 2 else "fail_on_recompile"):
                check_compiled(model, compiled, handle, x)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_exported_for_any_batch_size(family: str, plan: str) -> None:
    model = make(family)
    with torch.no_grad(), tokensieve.apply(model, PLANS[plan]) as handle:
        expected = {batch: eager(model, handle, images(batch)) for batch in (1, 2, 5)}
        program = torch.export.export(model, (images(2),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    with torch.no_grad():  # the plan is part of the program: it is no longer attached to the model
        for batch, wanted in expected.items():
            assert_near(feature(program.module()(images(batch))), wanted, steps=1000)


@pytest.mark.slow
def test_a_timm_tower_of_eight_blocks_is_exported_and_saved() -> None:
    """As in the documentation: anchor@6:60(rest=merge), with a program that is loaded where tokensieve is not needed."""
    torch.manual_seed(0)
    model = tiny_models.timm_model(img_size=64, depth=8, global_pool="avg").eval()  # 64 patches
    with torch.no_grad(), tokensieve.apply(model, "anchor@6:60(rest=merge)") as handle:
        expected = eager(model, handle, images(2, 64))
        assert [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger] == [("6", 64, 60)]
        program = torch.export.export(model, (images(2, 64),))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    with torch.no_grad():
        assert_near(torch.export.load(file).module()(images(2, 64)), expected, steps=1000)
        assert not torch.equal(model(images(2, 64)), expected)


@pytest.mark.slow
def test_a_mask_of_the_user_is_refused_while_exporting_too() -> None:
    """While exporting, transformers hands the layers a mask of its own, which is not an error."""
    model = make("DINOv2")
    arguments = {"attention_mask": torch.ones(2, 17, dtype=torch.long)}
    with torch.no_grad(), tokensieve.apply(model, "grid@2:8"), pytest.raises(UserError, match="attention mask"):
        torch.export.export(model, (images(2),), arguments)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "open_clip with texts"])
def test_encode_image_is_one_graph(family: str) -> None:
    model = tiny_models.open_clip_model(layers=2).eval() if family == "open_clip with texts" else make(family)
    torch._dynamo.reset()
    with torch.no_grad(), tokensieve.apply(model, "grid@2:8"):
        compiled = torch.compile(lambda x: encode_image(model, x), fullgraph=True, backend="eager")
        assert_near(compiled(images(2)), encode_image(model, images(2)), steps=1000)


@pytest.mark.slow
def test_what_is_not_one_graph() -> None:
    assert list(NOT_ONE_GRAPH) == ["SigLIP2"]
    torch.manual_seed(0)
    model = tiny_models.hf_model("Siglip2Vision", num_hidden_layers=2).eval()
    x = torch.randn(2, 16, 3 * model.config.patch_size**2, generator=torch.Generator().manual_seed(0))
    mask, shapes = torch.ones(2, 16, dtype=torch.long), torch.tensor([[4, 4], [4, 4]])
    with torch.no_grad(), tokensieve.apply(model, "grid@2:8"):
        expected = feature(model(x, mask, shapes))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.UserError, match="data-dependent"):
            torch.compile(model, fullgraph=True, backend="eager")(x, mask, shapes)
        torch._dynamo.reset()
        assert_near(feature(torch.compile(model, backend="eager")(x, mask, shapes)), expected, steps=1000)


@pytest.mark.slow
def test_random_choices_of_a_compiled_model_do_not_bake_a_counter_in() -> None:
    """Every batch is counted from 0 unless sample indices are given, which are an input of the graph."""
    model = make("timm")
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad(), tokensieve.apply(model, "random@2:8") as handle:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        first = compiled(images(2))
        assert torch.equal(compiled(images(2)), first) and len(graphs) == 1
        for indices in ([5, 6], [7, 8], [0, 1]):
            with handle.call(samples=torch.tensor(indices)):
                assert_near(compiled(images(2)), model(images(2)), steps=1000)
                assert handle.samples is not None and handle.samples.tolist() == indices
                kept = handle.kept
        assert len(graphs) == 2 and torch.equal(compiled(images(2)), first)
        assert handle.kept is not None and torch.equal(handle.kept, kept)


@pytest.mark.parametrize("check_finite", [True, False])
def test_finiteness_is_checked_in_eager_mode_by_default(check_finite: bool) -> None:
    model = make("timm")
    broken = images(2)
    broken[0, 0, 0, 0] = torch.nan
    options = {} if check_finite else {"check_finite": False}
    torch._dynamo.reset()
    with torch.no_grad(), tokensieve.apply(model, "random@2:8", **options):
        if check_finite:
            with pytest.raises(UserError, match="NaN"):
                model(broken)
        else:
            assert torch.isnan(model(broken)[0]).any() and torch.isfinite(model(broken)[1]).all()
        compiled = torch.compile(model, fullgraph=True, backend="eager")(broken)  # a graph has no branch for it
        assert torch.isnan(compiled[0]).any() and torch.isfinite(compiled[1]).all()
