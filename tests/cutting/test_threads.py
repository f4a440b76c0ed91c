"""One model with a plan, used by several threads, tasks and hooks at once: every call is what it is alone, to the bit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tests.support import hf_models, vlm_models
from tokensieve import UserError
from tokensieve.models.features import encode_image
from tokensieve.reid import build
from tokensieve.reid.model import ReidModel, Settings

THREADS = 8
PLANS = ("anchor@2:10(k=4,rest=merge)", "random@1:12 + anchor@3:6(k=3)", "random@out:9(rest=zero)", "pool@1:9")


def towers() -> dict[str, Callable[[], nn.Module]]:
    import timm
    from open_clip.transformer import VisionTransformer

    sizes = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
    return {
        "open_clip": lambda: VisionTransformer(
            image_size=48, patch_size=8, width=32, layers=4, heads=2, mlp_ratio=2, output_dim=16, pool_type="avg"
        ),
        "timm": lambda: timm.models.VisionTransformer(**sizes, global_pool="avg", num_classes=0),
        "timm_map": lambda: timm.models.VisionTransformer(**sizes, global_pool="map", class_token=False, num_classes=0),
        "hf": lambda: hf_models.build("clip"),
    }


@pytest.fixture(params=["open_clip", "timm", "timm_map", "hf"])
def tower(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return towers()[request.param]().eval()


def batches(count: int, seed: int) -> list[Tensor]:
    """Batches of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1 + (seed + i) % 3, 3, 48, 48, generator=generator) for i in range(count)]


def in_threads(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """What work(number) gives in so many threads that begin together."""
    barrier = threading.Barrier(threads)

    def begin(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(begin, range(threads)))


def one_by_one(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """The same, each in a thread of its own after the one before has ended."""
    results = []
    for number in range(threads):
        with ThreadPoolExecutor(1) as pool:
            results.append(pool.submit(work, number).result())
    return results


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")
def test_threads_of_a_tower_do_not_mix(tower: nn.Module, plan: str) -> None:
    with torch.inference_mode(), tokensieve.apply(tower, plan) as handle:

        def work(number: int) -> list[Any]:
            handle.restart()
            with torch.inference_mode():
                return [(encode_image(tower, images), handle.ledger, handle.kept) for images in batches(25, number)]

        assert same(in_threads(work), one_by_one(work))


@pytest.mark.slow
def test_many_calls_with_a_plan_on_each_of_two_models() -> None:
    torch.manual_seed(0)
    models = [towers()["timm"]().eval() for _ in range(2)]
    with tokensieve.apply(models[0], PLANS[1]) as first, tokensieve.apply(models[1], PLANS[0]) as second:

        def work(number: int) -> list[Any]:
            model, handle = (models[0], first) if number % 2 else (models[1], second)
            handle.restart()
            with torch.inference_mode():
                return [(model(images), handle.kept) for images in batches(200, number)]

        assert same(in_threads(work), one_by_one(work))


@pytest.mark.parametrize("plan", ["anchor@out:10(k=4,rest=merge) + random@llm.2:50%", "random@2:30 + anchor@llm.1:8(k=3)"])
def test_threads_of_a_vision_language_model_do_not_mix(plan: str) -> None:
    model = vlm_models.llava()
    prompts = [vlm_models.prompts((1, 2)[: 1 + i % 2], (5, 3)[: 1 + i % 2], seed=i) for i in range(4)]
    with tokensieve.apply(model, plan) as handle:

        def work(number: int) -> list[Any]:
            handle.restart()
            results = []
            with torch.inference_mode():
                for turn in range(4):
                    inputs = prompts[(number + turn) % 4]
                    if turn % 2:
                        results.append(model.generate(**inputs, max_new_tokens=3, do_sample=False))
                    else:
                        results.append(model(**inputs).logits)
                    results.append(handle.ledger)
            return results

        assert same(in_threads(work, 4), one_by_one(work, 4))


@pytest.fixture(scope="module")
def reid_model() -> ReidModel:
    torch.manual_seed(0)
    sizes = {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 0}
    settings = Settings("timm", "vit_tiny_patch16_224", (32, 16), arguments=sizes, cameras=4)
    return build.build(settings).eval()


@pytest.mark.parametrize("plan", ["random@out:3(rest=merge)", "anchor@1:4(k=2)"])
def test_threads_of_a_re_identification_model_do_not_mix(reid_model: ReidModel, plan: str) -> None:
    with tokensieve.apply(reid_model, plan) as handle:

        def work(number: int) -> list[Any]:
            handle.restart()
            results = []
            with torch.inference_mode():
                for turn in range(10):
                    images = torch.randn(2, 3, 32, 16, generator=torch.Generator().manual_seed(10 * number + turn))
                    names = ("RGB", "NI", "TI")[: 1 + (number + turn) % 3]
                    inputs = {name: images for name in names} | {"cameras": torch.tensor([number % 4, turn % 4])}
                    results += [reid_model.encode(inputs), handle.ledger]
            return results

        assert same(in_threads(work), one_by_one(work))


@pytest.mark.parametrize("plan", PLANS[:2])
def test_a_model_called_inside_of_its_own_hook(tower: nn.Module, plan: str) -> None:
    """The inner call is a call of its own; the outer one goes on as if there were none."""
    outer, inner = batches(1, 2)[0], batches(1, 3)[0]
    with torch.inference_mode(), tokensieve.apply(tower, plan) as handle:
        with handle.call(samples=torch.arange(len(outer))):
            alone, ledger = encode_image(tower, outer), handle.ledger
        with handle.call(samples=torch.arange(len(inner))):
            alone_inside = encode_image(tower, inner)
        for module in [module for module in tower.modules() if isinstance(module, nn.LayerNorm)]:
            seen: list[Tensor] = []

            def hook(*_: Any, seen: list[Tensor] = seen) -> None:
                if not seen:
                    seen.append(torch.empty(0))
                    with handle.call(samples=torch.arange(len(inner))):
                        seen.append(encode_image(tower, inner))

            mark = module.register_forward_hook(hook)
            try:
                with handle.call(samples=torch.arange(len(outer))):
                    got = encode_image(tower, outer)
            finally:
                mark.remove()
            assert torch.equal(got, alone) and handle.ledger == ledger
            assert not seen or torch.equal(seen[1], alone_inside)


def test_a_vision_language_model_called_inside_of_its_own_hook() -> None:
    model, outer, inner = vlm_models.llava(), vlm_models.prompts((1, 2), (5, 3)), vlm_models.prompts((1,), (7,), seed=1)
    plan = "anchor@out:10(k=4,rest=merge) + random@llm.2:50%"
    with torch.inference_mode(), tokensieve.apply(model, plan) as handle:

        def ask(inputs: Any) -> Tensor:
            with handle.call(samples=torch.arange(len(inputs["pixel_values"]))):
                return model.generate(**inputs, max_new_tokens=3, do_sample=False)

        alone, alone_inside = ask(outer), ask(inner)
        places = (model.model.vision_tower, model.model.multi_modal_projector, *model.model.language_model.layers[1:4])
        for module in places:
            seen: list[Tensor] = []

            def hook(*_: Any, seen: list[Tensor] = seen) -> None:
                if not seen:
                    seen.append(torch.empty(0))
                    seen.append(ask(inner))

            mark = module.register_forward_hook(hook)
            try:
                assert torch.equal(ask(outer), alone), type(module).__name__
            finally:
                mark.remove()
            assert torch.equal(seen[1], alone_inside)


def test_an_exception_half_way_leaves_no_trace(tower: nn.Module) -> None:
    first, second = batches(2, 1)
    with torch.inference_mode(), tokensieve.apply(tower, PLANS[0]) as handle:
        expected = encode_image(tower, second)

        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        mark = [module for module in tower.modules() if isinstance(module, nn.LayerNorm)][-2].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            encode_image(tower, first)
        mark.remove()
        assert handle.ledger == [] and handle.kept is None
        assert torch.equal(encode_image(tower, second), expected)


def test_tasks_of_asyncio_have_their_own_samples(tower: nn.Module) -> None:
    images = batches(1, 2)[0]

    with tokensieve.apply(tower, "random@2:8") as handle:

        async def one(first: int) -> Tensor:
            with handle.call(samples=torch.arange(first, first + len(images))):
                await asyncio.sleep(0)
                with torch.inference_mode():
                    return encode_image(tower, images)

        async def several() -> list[Tensor]:
            return list(await asyncio.gather(*(one(100 * number) for number in range(4))))

        together = asyncio.run(several())
        alone = [asyncio.run(one(100 * number)) for number in range(4)]
    assert same(together, alone)
    assert not torch.equal(together[0], together[1])  # the choices are random


def test_one_plan_at_a_time(tower: nn.Module) -> None:
    """Of several threads that put a plan on a model, one succeeds; the others are refused, and nothing is left behind."""
    stock = {name: value.__dict__.copy() for name, value in tower.named_modules()}

    def work(number: int) -> Any:
        try:
            return tokensieve.apply(tower, PLANS[number % 2])
        except UserError as error:
            return error

    results = in_threads(work)
    handles = [result for result in results if not isinstance(result, UserError)]
    assert len(handles) == 1 and all("another plan is attached" in str(r) for r in results if isinstance(r, UserError))
    handles[0].remove()
    assert all(value.__dict__.keys() == stock[name].keys() for name, value in tower.named_modules())


def test_numbers_of_samples_belong_to_a_call(tower: nn.Module) -> None:
    with tokensieve.apply(tower, "random@2:8") as handle, pytest.raises(UserError, match="handle.call"):
        handle.samples = torch.arange(3)


def same(one: Any, other: Any) -> bool:
    """Whether two nests of tensors and values are equal to the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)) and not hasattr(one, "tokens_in"):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
