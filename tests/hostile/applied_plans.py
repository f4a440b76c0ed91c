"""Random plans on tiny models: refused by `apply`, or carried out with the token counts that the plan says."""

from __future__ import annotations

import functools
import random
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tests.hostile.attack import Attack, refused
from tests.hostile.mutate import mutate_text
from tests.hostile.plans import plan_text
from tokensieve import Plan, apply
from tokensieve.methods.registry import REGISTRY
from tokensieve.testing import tiny_models, tiny_vlms

LAYERS = ("", "@1", "@2", "@3", "@0", "@-1", "@-3", "@1,2", "@2,-2", "@1,-3", "@*", "@*.attn", "@2.attn", "@-1.attn", "@out")
DECODER_LAYERS = ("@llm.0", "@llm.2", "@llm.1,3", "@llm.-1", "@llm.5,-1", "@llm.7")
BUDGETS = (
    "",
    ":1",
    ":5",
    ":12",
    ":15",
    ":16",
    ":17",
    ":500",
    ":50%",
    ":100%",
    ":0.001%",
    ":99.9%",
    ":-1",
    ":-8",
    ":-15",
    ":-16",
)
OPTIONS = {
    "rest": ("drop", "merge", "fuse", "zero"),
    "norm": ("0", "1", "4", "1e-9"),
    "sizes": ("yes", "no"),
    "k": ("1", "3", "16", "99999999999999999999", "0"),
    "m": ("0", "4", "99999999999999999999"),
    "alpha": ("0", "1", "1e-300", "2"),
    "normalize": ("none", "minmax"),
    "clip": ("inf", "1e-300", "2"),
    "size": ("24", "8", "1", "32", "100"),
    "scale": ("0.4", "1", "1e-9"),
}
TOWERS = {
    "open_clip": tiny_models.open_clip_model,
    "timm": tiny_models.timm_model,
    "eva": tiny_models.eva_model,
    "clip": functools.partial(tiny_models.hf_model, "CLIPVision"),
    "siglip": functools.partial(tiny_models.hf_model, "SiglipVision"),
    "dinov2": functools.partial(tiny_models.hf_model, "Dinov2"),
}


@functools.cache
def tower(name: str) -> Any:
    """A tiny tower of 3 blocks and 16 patches."""
    torch.manual_seed(0)
    return TOWERS[name]().eval()


@functools.cache
def llava() -> tuple[Any, dict[str, torch.Tensor]]:
    return tiny_vlms.llava(), tiny_vlms.prompts()


def encode(model: Any, images: torch.Tensor) -> torch.Tensor:
    """The image features of any tower."""
    if hasattr(model, "encode_image"):
        return model.encode_image(images)
    out = model(images)
    return (
        out
        if isinstance(out, torch.Tensor)
        else out.last_hidden_state.mean(1)
        if out.pooler_output is None
        else out.pooler_output
    )


def _step(rng: random.Random, layers: tuple[str, ...]) -> str:
    method = REGISTRY[rng.choice([name for name in REGISTRY if name != "none"])]
    if method.part is not None and rng.random() < 0.8:  # it would be refused: there are no weights for these models
        return _step(rng, layers)
    options = [f"{name}={rng.choice(OPTIONS[name])}" for name in method.options if name in OPTIONS and rng.random() < 0.3]
    where, budget = ("", "") if method.on_image else (rng.choice(layers), rng.choice(BUDGETS))
    return f"{method.name}{where}{budget}" + (f"({','.join(options)})" if options else "")


def _plan(rng: random.Random, layers: tuple[str, ...]) -> str:
    if rng.random() < 0.1:
        return plan_text(rng)
    text = " + ".join(_step(rng, layers) for _ in range(rng.choice((1, 1, 1, 2))))
    return mutate_text(rng, text) if rng.random() < 0.1 else text


def _run(rng: random.Random, model: Any, text: str, call: Any) -> None:
    """Applies a plan and calls the model. Checks counts, and that the model is as before afterwards."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        found: list[Plan] = []
        if refused(lambda: found.append(Plan.parse(text))) is not None:
            return
        stock = call()
        handles: list[Any] = []
        if refused(lambda: handles.append(apply(model, found[0]))) is None:
            (handle,) = handles
            try:
                outputs: list[torch.Tensor] = []
                if refused(lambda: outputs.append(call())) is None:
                    assert outputs[0].shape == stock.shape and bool(outputs[0].isfinite().all())
                    _check_ledger(handle)
                else:
                    assert handle.kept is None and not handle.ledger
            finally:
                handle.remove()
        assert torch.equal(call(), stock), "the model is not as before"


def _check_ledger(handle: Any) -> None:
    rows = [row for row in handle.ledger if row.layer != "image"]
    assert len(handle.ledger) >= len(handle.stages)
    for row, later in pairwise(rows):
        assert row.tokens_out == later.tokens_in or "zero" in str(handle.plan), handle.ledger
    assert all(1 <= row.tokens_out <= row.tokens_in for row in rows), handle.ledger
    for _, reduction in handle.stages:
        assert bool((reduction.index >= 0).all()) and bool((reduction.index < reduction.n).all())
        if reduction.sizes is not None:
            assert bool((reduction.sizes[reduction.is_real()] > 0).all()) and bool(reduction.sizes.isfinite().all())
    if handle.kept is not None and not any(row.layer == "image" for row in handle.ledger):
        assert handle.kept.shape[1] == rows[-1].tokens_out or "zero" in str(handle.plan)


def _tower(rng: random.Random, folder: Path) -> None:
    model = tower(rng.choice(sorted(TOWERS)))
    images = torch.randn(rng.choice((1, 2, 3)), 3, 32, 32, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    _run(rng, model, _plan(rng, LAYERS), lambda: encode(model, images))


def _llava(rng: random.Random, folder: Path) -> None:
    model, inputs = llava()
    _run(rng, model, _plan(rng, LAYERS + 3 * DECODER_LAYERS), lambda: model(**inputs).logits)


def _values(rng: random.Random, folder: Path) -> None:
    """Wrong values of the arguments of apply."""
    model = tower("timm")
    wrong = (None, 3, 2.5, "x", b"x", [], {}, object(), float("nan"), "\x00", "x" * 5000, Path("nowhere"), True)
    name = rng.choice(("model", "plan", "seed", "context", "weights"))
    given = {"model": model, "plan": "random@2:5"} | {name: rng.choice(wrong)}
    handles: list[Any] = []
    try:
        refused(lambda: handles.append(apply(given.pop("model"), given.pop("plan"), **given)))
    finally:
        for handle in handles:
            handle.remove()
    assert refused(lambda: apply(model, "random@2,-2:50%")) is not None  # both are after block 2


ATTACKS = (
    Attack("applied plans", "random plans on six tiny towers", _tower, per_thousand=200, short=250),
    Attack("decoder plans", "random plans on a tiny LLaVA", _llava, per_thousand=100, short=60),
    Attack("arguments", "wrong values of the arguments of apply", _values, per_thousand=100, short=100),
)
