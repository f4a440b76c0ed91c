"""A model with a plan keeps nothing of its calls but the record of each thread's last one."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokensieve
from tests.support import vlm_models
from tests.support.engine_models import TOWERS, images, make_reid_model, make_tower
from tokensieve.models.features import encode_image, get_image_features_with_tokens

MERGING = "anchor@2:10(k=4,rest=merge)"
pytestmark = pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")


def growth(work: Callable[[], Any], times: int) -> tuple[int, int]:
    """By how many objects a process grows over so many repetitions, and by how many bytes over 50."""
    for _ in range(20):
        work()
    gc.collect()
    objects = len(gc.get_objects())
    for _ in range(times):
        work()
    gc.collect()
    objects = len(gc.get_objects()) - objects
    tracemalloc.start()
    work()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    for _ in range(50):
        work()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] - size
    tracemalloc.stop()
    return objects, size


@torch.no_grad()
def run(model: Any, seed: int = 0) -> None:
    encode_image(model, images(1, seed))


def fail(model: Any) -> None:
    with pytest.raises(RuntimeError):
        model(images(1, 0)[:, :1])


def run_in_new_thread(model: Any) -> None:
    thread = threading.Thread(target=run, args=(model,))
    thread.start()
    thread.join()


def run_with_options(handle: Any, model: Any) -> None:
    with handle.call(samples=torch.tensor([3]), context={"name": "x"}):
        run(model)


def attach(model: Any) -> None:
    with tokensieve.apply(model, MERGING) as handle:
        run_with_options(handle, model)


@pytest.mark.slow
def test_memory_is_flat_over_1000_calls() -> None:
    model = make_tower("timm")
    handle = tokensieve.apply(model, MERGING)
    calls: dict[str, Callable[[], Any]] = {
        "call": lambda: run(model),
        "call that fails": lambda: fail(model),
        "call in a new thread": lambda: run_in_new_thread(model),
        "call with options": lambda: run_with_options(handle, model),
        "call that returns tokens": torch.no_grad()(lambda: get_image_features_with_tokens(model, images(1, 0))),
        "remove and attach": lambda: (handle.remove(), handle.attach()),
        "all of them": lambda: (fail(model), run_in_new_thread(model), handle.remove(), handle.attach(), run(model)),
    }
    for name, call in calls.items():
        objects, size = growth(call, 1000 if name == "call" else 200)
        assert objects < 50 and size < 50 * 2000, (name, objects, size)
    handle.remove()
    objects, size = growth(lambda: attach(model), 1000)
    assert objects < 50 and size < 50 * 2000, (objects, size)


@pytest.mark.slow
def test_memory_is_flat_over_generations() -> None:
    model, inputs = vlm_models.llava(), vlm_models.prompts((1,), (4,))
    with torch.no_grad(), tokensieve.apply(model, "anchor@2:5(k=2,rest=merge) + random@llm.2:3"):
        objects, size = growth(lambda: model.generate(**inputs, max_new_tokens=2, do_sample=False), 50)
    assert objects < 50 and size < 50 * 4000, (objects, size)


@pytest.mark.parametrize("kind", [*TOWERS, "vlm", "reid"])
def test_a_model_that_is_dropped_with_its_plan_is_freed(kind: str) -> None:
    model: Any
    if kind == "vlm":
        model = vlm_models.llava()
        handle = tokensieve.apply(model, "pool@2:9 + random@llm.2:4")
        model(**vlm_models.prompts((1,), (4,)))
    elif kind == "reid":
        model = make_reid_model()
        handle = tokensieve.apply(model, "pool@1:4")
        model.encode({"RGB": images(1, 0, (32, 16))})
    else:
        model = make_tower(kind)
        handle = tokensieve.apply(model, MERGING)
        run(model)
    watch = weakref.ref(model)
    del model, handle
    gc.collect()
    assert watch() is None


def test_a_failed_call_keeps_no_tensor() -> None:
    model: Any = make_tower("timm")
    seen: list[Any] = []

    def stop(module: Any, args: Any, out: torch.Tensor) -> None:
        seen.append(weakref.ref(out))
        raise KeyboardInterrupt

    with tokensieve.apply(model, MERGING) as handle:
        run(model)
        hook = model.blocks[2].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            run(model)
        hook.remove()
        gc.collect()
        assert seen[0]() is None and handle.kept is None and handle.samples is None
