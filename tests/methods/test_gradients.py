"""Training with a plan on: gradients pass through every method, and are those of what the model computes.

Of methods that select, they equal those of the same tokens gathered by hand between the stock blocks. Of the others (merges,
mixtures, trained modules), they equal the difference quotient of the loss where the choices stay the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tests.support import video_prompts, vlm_models
from tokensieve.core import Reduction
from tokensieve.methods.cross import Heads
from tokensieve.methods.merger import Merger
from tokensieve.methods.registry import REGISTRY, get_method
from tokensieve.models.features import get_image_features_with_tokens
from tokensieve.plan import Step
from tokensieve.testing import fresh_part
from tokensieve.testing.tiny_models import open_clip_model

pytestmark = pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")

UNCUT = {"none", "frames"}  # the latter keeps whole frames of a video, and so all of a picture
ON_TOKENS = sorted(name for name, method in REGISTRY.items() if not method.on_image and name not in UNCUT)
AT_HEAD = {"sdtps"}  # at the head of re-identification models; tests/reid/test_training.py trains it
WITH_QUESTION = {"merger": "merger@out:9", "cross": "cross@llm.2:7"}  # trained modules that read the question
IN_DECODER = [name for name in ON_TOKENS if name in WITH_QUESTION or Step(REGISTRY[name]).resolved_where(4, 6).part == "llm"]
IN_TOWER = [name for name in ON_TOKENS if name not in IN_DECODER and name not in AT_HEAD]
OF_VIDEOS = ("evs", "vidcom2", "vidcom2_vllm", "vcast", "holitom", "fastvid", "flashvid", "llava_scissor", "frames")
BUDGETS = {"diffrate": ":-2"}  # others keep 9 of the 16 or 36 tokens, or what their modules are made for
# Where scores nearly tie, a smaller step keeps the choice; where modules mix in float32, a larger one is above their rounding.
STEPS = {"mmtok": 1e-6, "merger": 1e-5, "vidtldr": 1e-3, "patchmerger": 1e-3, "sinkhorn": 1e-3, "sit": 1e-3}


def make() -> tuple[Any, Tensor, Tensor]:
    """A tiny CLIP of 5 blocks in double precision, images and texts."""
    torch.manual_seed(0)
    model: Any = open_clip_model(layers=5).double().eval()
    return model, torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.randn(2, 16, dtype=torch.float64)


def plan_of(name: str) -> str:
    method = get_method(name)
    if name in WITH_QUESTION:
        return WITH_QUESTION[name]
    if method.part is not None:  # made for 8 tokens after block 4, where it is made for a place
        return f"{name}@4" if "4" in fresh_places(name) else f"{name}@2:9"
    decides = method.count is not None or method.adaptive
    return name + BUDGETS.get(name, "" if decides else ":9")


def fresh_places(name: str) -> tuple[str, ...]:
    part: Any = fresh_part(get_method(name), 32)
    return tuple(part.places() or ()) if hasattr(part, "places") else ()


def part_of(name: str) -> dict[str, nn.Module] | None:
    """The method's trained module, not trained, for a tower of width 32 or the tiny LLaVA."""
    method = get_method(name)
    if name == "merger":
        return {name: Merger(24, keep=9, question_width=32).eval()}
    if name == "cross":
        return {name: Heads(32, layers=(2,), d_internal=16, keep=(7,), arriving=36).eval()}
    return None if method.part is None else {name: fresh_part(method, 32)}


def loss_of(tokens: Tensor, feature: Tensor) -> Tensor:
    """Each number has another weight, so that no two tokens have the same gradient."""
    weigh = torch.Generator().manual_seed(3)
    parts = [x * torch.randn(x.shape, generator=weigh, dtype=x.dtype) for x in (tokens, feature)]
    return torch.stack([part.sum() for part in parts]).sum()


def run(model: Any, images: Tensor, text: Tensor, handle: Any) -> Tensor:
    with handle.call(context={"text": text}, samples=torch.arange(len(images))):
        feature, tokens = get_image_features_with_tokens(model, images)
    assert tokens is not None
    return loss_of(tokens, feature)


def gather_by_hand(x: Tensor, reduction: Reduction) -> Tensor:
    """(B, 1+N, D) -> (B, 1+K, D)"""
    rows = [torch.cat([x[b, :1], x[b, 1:][reduction.index[b]]]) for b in range(len(x))]
    return torch.stack(rows)


def by_hand(visual: Any, images: Tensor, stages: dict[str, Reduction]) -> Tensor:
    """The loss of an open_clip tower whose tokens are gathered where the plan did."""
    x = visual.conv1(images).flatten(2).transpose(1, 2)
    x = torch.cat([visual.class_embedding.expand(len(x), 1, -1), x], dim=1) + visual.positional_embedding
    x = visual.ln_pre(x)
    x = gather_by_hand(x, stages["0"]) if "0" in stages else x
    for number, block in enumerate(visual.transformer.resblocks, start=1):
        normed = block.ln_1(x)
        x = x + block.attn(normed, normed, normed, need_weights=False)[0]
        x = gather_by_hand(x, stages[f"{number}.attn"]) if f"{number}.attn" in stages else x
        x = x + block.mlp(block.ln_2(x))
        x = gather_by_hand(x, stages[str(number)]) if str(number) in stages else x
    x = gather_by_hand(x, stages["out"]) if "out" in stages else x
    return loss_of(x[:, 1:], visual.ln_post(x)[:, 0] @ visual.proj)


def difference_quotient(loss: Any, leaves: list[Tensor], step: float) -> tuple[float, float, float]:
    """Along a random direction of all leaves: the gradient's part, the difference quotient, and the size to compare with."""
    made = torch.Generator().manual_seed(5)
    scales = [leaf.detach().std(correction=0).clamp_min(0.05) for leaf in leaves]
    direction = [
        torch.randn(leaf.shape, generator=made, dtype=leaf.dtype) * scale for leaf, scale in zip(leaves, scales, strict=True)
    ]
    grads = torch.autograd.grad(loss(), leaves, allow_unused=True)
    along = [float((grad * way).sum()) for grad, way in zip(grads, direction, strict=True) if grad is not None]
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for leaf, way in zip(leaves, direction, strict=True):
                leaf.add_(way, alpha=sign * step)
            values.append(float(loss()))
            for leaf, way in zip(leaves, direction, strict=True):
                leaf.sub_(way, alpha=sign * step)
    return sum(along), (values[0] - values[1]) / (2 * step), sum(map(abs, along)) + 1e-9


@pytest.mark.parametrize("name", IN_TOWER)
def test_in_a_tower(name: str) -> None:
    model, images, text = make()
    images.requires_grad_(True)
    parts, leaves = part_of(name), [images, *model.visual.parameters()]
    with tokensieve.apply(model, plan_of(name), weights=parts) as handle:
        loss = run(model, images, text, handle)
        stages = dict(handle.stages)
        assert stages, "nothing was cut"
        if all(each.is_selection and each.sizes is None and each.soft is None for each in stages.values()):
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
            expected_loss = by_hand(model.visual, images, stages)
            known = torch.autograd.grad(expected_loss, leaves, allow_unused=True)
            torch.testing.assert_close(loss, expected_loss, rtol=1e-9, atol=1e-9)
            largest = max(float(grad.abs().max()) for grad in known if grad is not None)
            for one, other in zip(found, known, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9 * largest)
            assert found[0].abs().sum() > 0
            return
        kept: list[Tensor] = []

        def again() -> Tensor:
            out = run(model, images, text, handle)
            kept.append(torch.cat([each.groups for _, each in handle.stages], dim=1))
            return out

        along, quotient, size = difference_quotient(again, leaves, STEPS.get(name, 1e-4))
        assert all(torch.equal(each, kept[0]) for each in kept), "another choice: take a smaller step"
        assert abs(along - quotient) < 1e-3 * size, (along, quotient, size)
        (grad,) = torch.autograd.grad(again(), [images])
        assert grad.isfinite().all() and grad.abs().sum() > 0


@pytest.mark.parametrize("name", IN_DECODER)
def test_in_a_language_model(name: str) -> None:
    model, batch = vlm_models.in_float64(vlm_models.llava(), vlm_models.prompts())
    check_language_model(name, plan_of(name), model, batch, "pixel_values")


@pytest.mark.parametrize("name", OF_VIDEOS)
def test_of_a_video(name: str) -> None:
    """4 frames of 3 x 3 tokens, of which half are kept."""
    family = "llava_onevision"
    clip = video_prompts.pictures_and_clips(family)[1][0]
    model, batch = vlm_models.in_float64(
        vlm_models.relative(family)[0], video_prompts.batch_of(family, video_prompts.TEXTS[:1], [], [clip])
    )
    check_language_model(name, f"{name}@llm.0:18", model, batch, "pixel_values_videos")


def check_language_model(name: str, plan: str, model: Any, batch: dict[str, Tensor], pixels: str) -> None:
    batch[pixels].requires_grad_(True)
    parts, leaves = part_of(name), [batch[pixels], *model.parameters()]
    with tokensieve.apply(model, plan, weights=parts) as handle:
        kept: list[Tensor] = []

        def loss() -> Tensor:
            logits = model(**batch).logits
            out = loss_of(logits, logits)
            kept.append(torch.cat([each.groups for _, each in handle.stages], dim=1))
            return out

        along, quotient, size = difference_quotient(loss, leaves, STEPS.get(name, 1e-4))
        assert handle.stages and all(torch.equal(each, kept[0]) for each in kept)
        assert abs(along - quotient) < 1e-3 * size, (along, quotient, size)
        (grad,) = torch.autograd.grad(loss(), [batch[pixels]])
        assert grad.isfinite().all() and grad.abs().sum() > 0
