"""Tiny models and random plans for the hostile tries on models. This module has no class of its own."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import tokensieve
from tests.support import vlm_models
from tests.support.engine_models import TOWERS, images, make_reid_model, make_tower
from tokensieve import UserError
from tokensieve.cutting.handle import Handle
from tokensieve.errors import PlanWarning
from tokensieve.models.features import encode_image

KINDS = (*TOWERS, "vlm", "reid")
DEPTH = {"vlm": 3, "reid": 3}  # blocks that can be cut; of the others 4
METHODS = ("anchor", "cover", "tome", "random", "grid", "pool")
SELECTING = ("anchor", "random", "grid")


@functools.cache
def model_of(kind: str, twin: int = 0) -> Any:
    """A model of this kind, made once. Twins have the same weights."""
    if kind == "vlm":
        return vlm_models.llava()
    return make_reid_model() if kind == "reid" else make_tower(kind)


def random_step(rng: random.Random, kind: str, inside_decoder: bool = False) -> str:
    """A step that most models of this kind can carry out."""
    name = rng.choice(METHODS)
    depth = DEPTH.get(kind, 4)
    layers = [f"llm.{layer}" for layer in range(6)] if inside_decoder else [str(layer) for layer in range(depth + 1)]
    if not inside_decoder:
        layers += [f"{layer}.attn" for layer in range(1, depth + 1)] + ["out"]
    where = rng.choice(layers)
    budget = rng.choice((":1", ":2", ":5", ":50%", ":90%", ":100%", ":-1", ":-3", ":500", ":17%"))
    options = [f"k={rng.choice((1, 2, 5))}"] if name == "anchor" else []
    if name in SELECTING:
        options += rng.choice(([], ["rest=merge"], ["rest=fuse"], ["rest=merge", "norm=2"], ["rest=merge", "sizes=no"]))
    return f"{name}@{where}{budget}" + (f"({','.join(options)})" if options else "")


def random_plan(rng: random.Random, kind: str) -> str:
    """A plan of one to three steps, in the order of the model."""
    steps = [random_step(rng, kind) for _ in range(rng.choice((1, 1, 2)))]
    if kind == "vlm" and rng.random() < 0.7:
        steps = [*steps[: rng.randrange(2)], random_step(rng, kind, inside_decoder=True)]
    if rng.random() < 0.1:
        steps.insert(0, rng.choice(("resize(scale=0.5)", "resize(scale=1.0)", "resize(scale=0.8)")))
    return " + ".join(steps)


@contextmanager
def applied(model: nn.Module, rng: random.Random, kind: str) -> Iterator[Handle]:
    """The model with a random plan that fits it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        while True:
            try:
                handle = tokensieve.apply(model, random_plan(rng, kind), seed=rng.randrange(5))
                break
            except UserError:
                continue  # another one
        with handle:
            yield handle


def make_inputs(rng: random.Random, kind: str) -> tuple[Any, int]:
    """Inputs of a call, and its number of samples."""
    seed = rng.randrange(1000)
    if kind == "vlm":
        counts = rng.choice(((1,), (1, 2), (2,), (1, 1)))
        return vlm_models.prompts(counts, tuple(rng.randint(2, 5) for _ in counts), seed=seed), sum(counts)
    batch = rng.randint(1, 3)
    if kind == "reid":
        names = rng.sample(("RGB", "NI", "TI"), rng.randint(1, 3))
        made = {name: images(batch, seed + number, (32, 16)) for number, name in enumerate(names)}
        return made | {"cameras": torch.arange(batch) % 4}, batch
    return images(batch, seed), batch


def call_of(model: Any, kind: str, inputs: Any, generates: bool = False) -> Callable[[], Tensor]:
    """A call of the model with these inputs; its output is one tensor."""
    if kind == "vlm" and generates:
        return lambda: model.generate(**inputs, max_new_tokens=2, do_sample=False)
    if kind == "vlm":
        return lambda: model(**inputs).logits
    return (lambda: model.encode(inputs)) if kind == "reid" else (lambda: encode_image(model, inputs))
