"""A model with a plan in several threads, hooks and tasks at once: every call gives the result of a call alone, bit for bit."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tests.support import vlm_models
from tests.support.engine_models import images, make_reid_model, make_tower
from tests.support.rounding import assert_near
from tests.support.states import assert_untouched, same, snapshot
from tokensieve import UserError
from tokensieve.cutting.handle import Handle
from tokensieve.models.features import encode_image

THREADS, CALLS = 8, 200
MERGING = "anchor@2:10(k=4,rest=merge)"
PLANS = {
    "open_clip": MERGING,
    "timm": "random@1:12 + anchor@3:6(k=3)",
    "timm_map": "pool@1:9",
    "eva": "cover@1:12 + anchor@3:6(k=3,rest=merge)",
    "hf": "random@1:20(rest=fuse) + anchor@2.attn:10(k=4)",
}
VLM_PLAN = "anchor@out:10(k=4,rest=merge) + random@llm.2:50%"
pytestmark = pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")

Case = tuple[Callable[[], Any], Handle, Tensor]  # a call, the handle of its model, and the indices of its samples


@pytest.fixture(params=list(PLANS))
def tower(request: pytest.FixtureRequest) -> nn.Module:
    return make_tower(request.param)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns after every few instructions, so that state they share would mix at once."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """The results of work(number), in threads that start together."""
    barrier = threading.Barrier(threads)

    def start(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(start, range(threads)))


def run(case: Case) -> tuple[Any, Any, Any, Any]:
    """The output of a call, and what its handle reports of it."""
    call, handle, samples = case
    with torch.inference_mode(), handle.call(samples=samples):
        output = call()
        return output, handle.ledger, handle.kept, handle.samples


def check_in_threads(cases: list[Case], calls: int = CALLS) -> None:
    """Every thread makes so many calls, in an order of its own; each result is that of one thread alone."""
    with ThreadPoolExecutor(1) as pool:
        alone = list(pool.map(run, cases))

    def work(number: int) -> list[int]:
        order = [(number * 7 + turn * (1 + number % 3)) % len(cases) for turn in range(calls)]
        return [index for index in order if not same(run(cases[index]), alone[index])]

    assert in_threads(work) == [[]] * THREADS


def tower_cases(families: list[str], batches: int) -> Iterator[list[Case]]:
    """Batches of 1 to 3 images for towers of these families, each with its own plan."""
    towers = [make_tower(family) for family in families]
    handles = [tokensieve.apply(tower, PLANS[family]) for tower, family in zip(towers, families, strict=True)]
    yield [
        (partial(encode_image, tower, images(1 + seed % 3, seed)), handle, torch.arange(1 + seed % 3) + 10 * seed)
        for seed in range(batches)
        for tower, handle in zip(towers, handles, strict=True)
    ]
    for handle in handles:
        handle.remove()


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).logits


def vlm_cases() -> Iterator[list[Case]]:
    """Prompts with one or two images for two models with different plans, by forward and by generate."""
    models = [vlm_models.llava(), vlm_models.llava("qwen2", seed=1)]
    handles = [tokensieve.apply(models[0], VLM_PLAN), tokensieve.apply(models[1], "random@2:30 + anchor@llm.1:8(k=3)")]
    cases: list[Case] = []
    for seed, (counts, words) in enumerate([((1,), (4,)), ((1, 2), (5, 3)), ((2,), (3,)), ((1, 1), (2, 4))]):
        inputs, samples = vlm_models.prompts(counts, words, seed=seed), torch.arange(sum(counts)) + 10 * seed
        for model, handle in zip(models, handles, strict=True):
            cases += 4 * [(partial(logits, model, inputs), handle, samples)]
            cases.append((partial(model.generate, **inputs, max_new_tokens=2, do_sample=False), handle, samples))
    yield cases
    for handle in handles:
        handle.remove()


def reid_cases() -> Iterator[list[Case]]:
    """Objects with one to three modalities for two models, one cut in the backbone, the other at the output."""
    models = [make_reid_model(), make_reid_model()]
    handles = [tokensieve.apply(models[0], "anchor@1:4(k=2)"), tokensieve.apply(models[1], "random@out:3(rest=merge)")]
    cases: list[Case] = []
    for seed in range(6):
        names, batch = ("RGB", "NI", "TI")[: 1 + seed % 3], 1 + seed // 3
        inputs = {name: images(batch, 10 * seed + number, (32, 16)) for number, name in enumerate(names)}
        inputs["cameras"] = (torch.arange(batch) + seed) % 4
        for model, handle in zip(models, handles, strict=True):
            cases.append((partial(model.encode, inputs), handle, torch.arange(batch) + 10 * seed))
    yield cases
    for handle in handles:
        handle.remove()


CASES: dict[str, Callable[[], Iterator[list[Case]]]] = {
    "towers": lambda: tower_cases(list(PLANS), 6),
    "vision-language models": vlm_cases,
    "re-identification models": reid_cases,
}


@pytest.mark.parametrize("kind", CASES)
def test_threads_do_not_mix(kind: str, frequent_switches: None) -> None:
    for cases in CASES[kind]():
        check_in_threads(cases, calls=8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_eight_threads_with_200_calls_each(kind: str) -> None:
    for cases in CASES[kind]():
        check_in_threads(cases)


def test_each_thread_counts_its_own_samples(frequent_switches: None) -> None:
    """Without sample indices, the random choices of a thread are those of a thread alone."""
    model = make_tower("timm")
    with tokensieve.apply(model, PLANS["timm"]) as handle:

        def work(number: int) -> list[Any]:
            with torch.inference_mode():
                outputs = [(model(images(1 + (number + turn) % 3, turn)), handle.kept, handle.samples) for turn in range(8)]
            handle.restart()
            return outputs

        alone = []
        for number in range(THREADS):
            with ThreadPoolExecutor(1) as pool:
                alone.append(pool.submit(work, number).result())
        assert same(in_threads(work), alone)


# --- what a call may leave behind ---------------------------------------------------------------------------------


def state_of(handle: Handle, model: nn.Module) -> list[dict[str, Any]]:
    """The attributes of the handle, of all that it holds in this package, and of the modules of the model.

    The states of threads and calls are left out: they are what belongs to a call.
    """
    seen: dict[int, dict[str, Any]] = {}

    def visit(value: Any) -> None:
        if id(value) in seen or not type(value).__module__.startswith("tokensieve.") or isinstance(value, threading.local):
            return
        seen[id(value)] = dict(vars(value)) if hasattr(value, "__dict__") else {}
        for attribute in seen[id(value)].values():
            for part in attribute if isinstance(attribute, (list, tuple)) else (attribute,):
                visit(part)

    visit(handle)
    return [*seen.values(), *(dict(vars(module)) for module in model.modules())]


def find_changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """The attributes that are new, gone, or another object."""
    changes = []
    for one, other in zip(before, after, strict=True):
        changes += [name for name in one.keys() | other.keys() if one.get(name, changes) is not other.get(name, changes)]
    return changes


@pytest.mark.parametrize("kind", CASES)
def test_forward_writes_nothing_on_handle_or_model(kind: str) -> None:
    for cases in CASES[kind]():
        owners = {id(handle): handle for _, handle, _ in cases}
        models = {key: model_of(handle) for key, handle in owners.items()}
        for case in cases:
            run(case)  # transformers installs hooks in the first forward of a model, with a plan or without
        before = {key: (state_of(handle, models[key]), snapshot(models[key])) for key, handle in owners.items()}
        assert all(len(state) > 5 for state, _ in before.values())
        for case in cases:
            run(case)
        for key, handle in owners.items():
            assert not find_changes(before[key][0], state_of(handle, models[key]))
            assert_untouched(models[key], before[key][1])


def model_of(handle: Handle) -> nn.Module:
    """The model that a handle is attached to."""
    if handle._decoder is not None:
        return handle._decoder.vlm.model
    assert handle._open_tower is not None
    return handle._open_tower.entries[0].owner


# --- calls inside calls, calls that fail --------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [MERGING, PLANS["timm"]])
def test_a_model_called_inside_its_own_hook(tower: nn.Module, plan: str) -> None:
    """The inner call is a call of its own, wherever the hook is; the outer one continues unchanged."""
    outer, inner = images(2, 2), images(3, 3)
    with torch.inference_mode(), tokensieve.apply(tower, plan) as handle:

        def encode(x: Tensor) -> tuple[Any, ...]:
            with handle.call(samples=torch.arange(len(x))):
                return encode_image(tower, x), handle.ledger, handle.kept

        alone, alone_inside = encode(outer), encode(inner)
        called = 0
        for module in [module for module in tower.modules() if isinstance(module, nn.LayerNorm)]:
            results: list[Any] = []

            def hook(*_: Any, results: list[Any] = results) -> None:
                if not results:
                    results.append(None)  # the inner call runs the hook too
                    results[0] = encode(inner)

            mark = module.register_forward_hook(hook)
            try:
                assert same(encode(outer), alone)
            finally:
                mark.remove()
            called += len(results)
            assert all(same(result, alone_inside) for result in results)
        assert called >= 8


@pytest.mark.parametrize("ask", ["forward", "generate"])
def test_a_vision_language_model_called_inside_its_own_hook(ask: str) -> None:
    model, outer, inner = vlm_models.llava(), vlm_models.prompts((1, 2), (5, 3)), vlm_models.prompts((1,), (7,), seed=1)
    with torch.inference_mode(), tokensieve.apply(model, VLM_PLAN) as handle:

        def answer(inputs: Any, ask: str) -> tuple[Tensor, Any]:
            with handle.call(samples=torch.arange(len(inputs["pixel_values"]))):
                if ask == "forward":
                    return model(**inputs).logits, handle.ledger
                return model.generate(**inputs, max_new_tokens=3, do_sample=False), handle.ledger

        alone = answer(outer, "generate")
        alone_inside = answer(inner, ask)
        places = (model.model.vision_tower, model.model.multi_modal_projector, *model.model.language_model.layers[1:4])
        for module in places:
            results: list[Any] = []

            def hook(*_: Any, results: list[Any] = results) -> None:
                if not results:
                    results.append(None)
                    results[0] = answer(inner, ask)

            mark = module.register_forward_hook(hook)
            try:
                assert same(answer(outer, "generate"), alone), type(module).__name__
            finally:
                mark.remove()
            assert same(results, [alone_inside])


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def check_failing_call(handle: Handle, module: nn.Module, first: Callable[[], Any], second: Callable[[], Any]) -> None:
    """A call that fails inside a module leaves no record, and the next call is right."""
    with torch.inference_mode():
        handle.restart()
        second()
        handle.restart()
        expected = second(), handle.ledger, handle.kept
        mark = module.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            first()
        mark.remove()
        assert handle.ledger == [] and handle.stages == []
        assert handle.kept is None and handle.groups is None and handle.reduction is None and handle.samples is None
        handle.restart()
        assert same((second(), handle.ledger, handle.kept), expected)


def test_an_exception_half_way_leaves_no_trace(tower: nn.Module) -> None:
    with tokensieve.apply(tower, MERGING) as handle:
        for module in [module for module in tower.modules() if isinstance(module, nn.LayerNorm)][-4:-1]:
            check_failing_call(
                handle, module, lambda: encode_image(tower, images(3, 1)), lambda: encode_image(tower, images(2, 2))
            )


def test_an_exception_in_a_vision_language_model_leaves_no_trace() -> None:
    model, first, second = vlm_models.llava(), vlm_models.prompts((1, 2), (5, 3)), vlm_models.prompts((1,), (7,), seed=1)
    with tokensieve.apply(model, VLM_PLAN) as handle:
        for module in (model.model.vision_tower, model.model.multi_modal_projector, model.model.language_model.layers[3]):
            check_failing_call(
                handle,
                module,
                lambda: model.generate(**first, max_new_tokens=2, do_sample=False),
                lambda: model(**second).logits,
            )


def test_an_exception_in_a_re_identification_model_leaves_no_trace() -> None:
    model = make_reid_model()
    inputs = {"RGB": images(2, 0, (32, 16)), "TI": images(2, 1, (32, 16)), "cameras": torch.tensor([1, 2])}
    with tokensieve.apply(model, "anchor@1:4(k=2)") as handle:
        norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
        check_failing_call(handle, norms[-2], lambda: model.encode(inputs), lambda: model.encode(inputs))


def test_a_call_that_fails_after_a_call_inside_it_leaves_no_record(tower: nn.Module) -> None:
    norms = [module for module in tower.modules() if isinstance(module, nn.LayerNorm)]
    with torch.inference_mode(), tokensieve.apply(tower, MERGING) as handle:
        encode_image(tower, images(2, 0))
        inside: list[Any] = []

        def call_and_fail(*_: Any) -> None:
            if not inside:
                inside.append(None)
                encode_image(tower, images(3, 1))
                inside.append(handle.kept)
                raise KeyboardInterrupt

        mark = norms[-3].register_forward_hook(call_and_fail)
        with pytest.raises(KeyboardInterrupt):
            encode_image(tower, images(2, 2))
        mark.remove()
        assert inside[1].shape == (3, 10)
        assert handle.kept is None and handle.ledger == [] and handle.stages == [] and handle.samples is None


def test_a_call_that_fails_before_the_first_block_leaves_no_record() -> None:
    reid, vlm = make_reid_model(), vlm_models.llava()
    inputs = {"RGB": images(2, 0, (32, 16))}
    with torch.inference_mode(), tokensieve.apply(reid, "anchor@1:4(k=2)") as handle:
        reid.encode(inputs)
        assert handle.kept is not None
        for bad in ({}, {"XYZ": inputs["RGB"]}, {"RGB": inputs["RGB"][:, :1]}):
            with pytest.raises((UserError, RuntimeError)):
                reid.features(bad)
            assert handle.kept is None and handle.ledger == []
    with torch.inference_mode(), tokensieve.apply(vlm, VLM_PLAN) as handle:
        for bad in ({"inputs": [1, 2]}, {"input_ids": torch.zeros(1, 4), "pixel_values": torch.zeros(1)}):
            vlm(**vlm_models.prompts((1,), (4,)))
            assert handle.kept is not None
            with pytest.raises((AttributeError, ValueError, RuntimeError)):
                vlm.generate(**bad)
            assert handle.kept is None and handle.ledger == []


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_generate_that_fails_half_way_leaves_no_record(error: type[BaseException]) -> None:
    model, inputs = vlm_models.llava(), vlm_models.prompts((1, 2), (5, 3))
    with torch.inference_mode(), tokensieve.apply(model, VLM_PLAN) as handle:

        def answer() -> Tensor:
            with handle.call(samples=torch.arange(3)):
                return model.generate(**inputs, max_new_tokens=4, do_sample=False)

        expected = answer(), handle.ledger
        assert handle.kept is not None
        steps: list[int] = []

        def fail_later(*_: Any) -> None:
            steps.append(1)
            if len(steps) == 3:
                raise error

        mark = model.model.language_model.layers[4].register_forward_hook(fail_later)
        with pytest.raises(error):
            answer()
        mark.remove()
        assert len(steps) == 3 and handle.kept is None and handle.ledger == [] and handle.stages == []
        assert same((answer(), handle.ledger), expected)


def test_an_exception_in_one_thread_does_not_disturb_others(frequent_switches: None) -> None:
    model = make_tower("timm")
    norm = [module for module in model.modules() if isinstance(module, nn.LayerNorm)][3]
    failing: set[int] = set()

    def fail_in_some(*_: Any) -> None:
        if threading.get_ident() in failing:
            raise ZeroDivisionError

    norm.register_forward_hook(fail_in_some)
    with torch.inference_mode(), tokensieve.apply(model, MERGING) as handle:
        expected = model(images(2, 0)), handle.ledger

        def work(number: int) -> list[bool]:
            results = []
            with torch.inference_mode():
                for turn in range(10):
                    if number % 2 and turn % 2:
                        failing.add(threading.get_ident())
                        with pytest.raises(ZeroDivisionError):
                            model(images(2, 0))
                        failing.discard(threading.get_ident())
                        results.append(handle.ledger == [])
                    else:
                        results.append(same((model(images(2, 0)), handle.ledger), expected))
            return results

        assert all(map(all, in_threads(work)))


# --- modes, tasks, options ----------------------------------------------------------------------------------------


def test_inference_mode_and_gradients_in_turn(tower: nn.Module) -> None:
    """A call under torch.inference_mode leaves nothing behind that a call with gradients would use."""
    x = images(2, 0)
    with tokensieve.apply(tower, MERGING) as handle:
        with torch.inference_mode():
            expected = encode_image(tower, x)
            assert expected.is_inference() and handle.kept is not None
        trained = encode_image(tower, x)
        trained.sum().backward()
        assert_near(trained.detach(), expected.clone())  # not bit-equal: nn.MultiheadAttention has a fast path for inference
        assert any(parameter.grad is not None for parameter in tower.parameters())


def test_tasks_of_asyncio_have_their_own_samples(tower: nn.Module) -> None:
    x = images(3, 2)
    with tokensieve.apply(tower, "random@2:8") as handle:

        async def encode(first: int) -> tuple[Tensor, Any]:
            with handle.call(samples=torch.arange(first, first + len(x))):
                await asyncio.sleep(0)
                with torch.inference_mode():
                    return encode_image(tower, x), handle.kept

        async def in_thread(first: int) -> tuple[Tensor, Any]:
            """The options of a task hold in the threads that it starts, too."""
            with handle.call(samples=torch.arange(first, first + len(x))):
                await asyncio.sleep(0)
                return await asyncio.to_thread(in_inference_mode)

        @torch.inference_mode()
        def in_inference_mode() -> tuple[Tensor, Any]:
            return encode_image(tower, x), handle.kept

        async def all_at_once(work: Callable[[int], Any]) -> list[Any]:
            return list(await asyncio.gather(*(work(100 * number) for number in range(4))))

        alone = [asyncio.run(encode(100 * number)) for number in range(4)]
        assert same(asyncio.run(all_at_once(encode)), alone)
        assert same(asyncio.run(all_at_once(in_thread)), alone)
    assert not torch.equal(alone[0][1], alone[1][1])  # the choices are random


def test_sample_indices_belong_to_a_call(tower: nn.Module) -> None:
    with tokensieve.apply(tower, "random@2:8") as handle, pytest.raises(UserError, match=r"handle\.call"):
        handle.samples = torch.arange(3)


# --- attach and remove --------------------------------------------------------------------------------------------


def test_one_plan_at_a_time(tower: nn.Module, frequent_switches: None) -> None:
    """Of several threads that attach a plan, one succeeds. The others get an error, and leave nothing behind."""
    before = snapshot(tower)

    def work(number: int) -> Any:
        try:
            return tokensieve.apply(tower, (MERGING, PLANS["timm"])[number % 2])
        except UserError as error:
            return error

    for _ in range(5):
        results = in_threads(work)
        handles = [result for result in results if not isinstance(result, UserError)]
        assert len(handles) == 1 and all("another plan is attached" in str(r) for r in results if isinstance(r, UserError))
        handles[0].remove()
        assert_untouched(tower, before)


def test_one_handle_attached_and_removed_by_several_threads(tower: nn.Module, frequent_switches: None) -> None:
    before = snapshot(tower)
    handle = tokensieve.apply(tower, MERGING)
    expected = encode_image(tower, images(1, 0))
    in_threads(lambda number: [handle.attach() if number % 2 else handle.remove() for _ in range(5)])
    handle.attach()
    assert torch.equal(encode_image(tower, images(1, 0)), expected)
    handle.remove()
    assert not handle.is_attached
    assert_untouched(tower, before)


def test_one_plan_at_a_time_on_other_models() -> None:
    vlm, reid = vlm_models.llava(), make_reid_model()
    for model, plans in ((vlm, ("random@llm.1:8", "random@2:8")), (reid, ("random@1:4", "random@out:4"))):
        for first, second in (plans, plans[::-1]):
            with tokensieve.apply(model, first), pytest.raises(UserError, match="another plan is attached"):
                tokensieve.apply(model, second)


def test_threads_of_a_pruned_encoder_take_turns(frequent_switches: None) -> None:
    encoder = tokensieve.PrunedVisionEncoder(make_tower("open_clip"), k_anchors=2, top_m=6)
    alone = encoder(images(2, 0)).detach(), encoder.ledger
    results = in_threads(lambda number: [(encoder(images(2, 0)).detach(), encoder.ledger) for _ in range(3)])
    assert same(results, [[alone] * 3] * THREADS)
