"""Images, weights and tokens that are not finite, other types of numbers, batches of 0 and 1, odd sizes: right, or an error
that names the layer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.hostile.attack import Attack, check_message
from tests.hostile.engine import applied, call_of, make_inputs, model_of
from tests.support.engine_models import TOWERS, images
from tokensieve import UserError
from tokensieve.cutting.handle import Handle
from tokensieve.errors import NotFinite
from tokensieve.models.registry import open_tower

BAD = (float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e25)


def _pixels(kind: str, inputs: Any, rng: random.Random) -> Tensor:
    """The images of one of the inputs, (B, 3, h, w)."""
    if kind == "vlm":
        return inputs["pixel_values"]
    return inputs[rng.choice(sorted(set(inputs) - {"cameras"}))] if kind == "reid" else inputs


def _finite_rows(out: Tensor) -> Tensor:
    return torch.isfinite(out.float()).flatten(1).all(1)


def _bad_input(rng: random.Random, folder: Path) -> None:
    """A pixel or a weight that is not finite: an error that names layer and image, or the numbers of the stock model."""
    kind = rng.choice((*TOWERS, "vlm", "reid"))
    model = model_of(kind)
    inputs, _ = make_inputs(rng, kind)
    call = call_of(model, kind, inputs)
    bad = rng.choice(BAD)
    weight = None
    if rng.random() < 0.5:
        pixels = _pixels(kind, inputs, rng)
        row = rng.randrange(len(pixels))
        pixels[row, rng.randrange(3), rng.randrange(pixels.shape[2]), rng.randrange(pixels.shape[3])] = bad
    else:
        weight = rng.choice([parameter for block in open_tower(model).blocks for parameter in block.module.parameters()])
        place = tuple(rng.randrange(side) for side in weight.shape)
        before = weight.detach().clone()
        with torch.no_grad():
            weight[place] = bad
    try:
        with torch.no_grad():
            stock = _finite_rows(call())
            with applied(model, rng, kind) as handle:
                _check_call(handle, call, stock)
    finally:
        if weight is not None:
            with torch.no_grad():
                weight.copy_(before)


def _check_call(handle: Handle, call: Callable[[], Tensor], stock_is_finite: Tensor) -> None:
    try:
        out = call()
    except NotFinite as error:
        check_message(str(error))
        layers = [cut.name for cuts in (handle._tower, handle._decoder) for cut in _cuts(cuts)]
        named = re.search(r"at layer (\S+) contain", str(error))
        assert named is not None and named[1] in layers, f"no layer of {handle.plan}: {error}"
        assert re.search(r"image \d+ of the batch|all \d+ images", str(error)), f"no image: {error}"
        assert handle.kept is None and handle.ledger == [], "a failed call left a record"
        return
    if not handle.has_cut:
        assert torch.equal(_finite_rows(out), stock_is_finite), "not the stock model"


def _cuts(cuts: Any) -> list[Any]:
    if cuts is None:
        return []
    return [cut for of_layer in cuts.layers.cuts.values() for cut in of_layer] if hasattr(cuts, "layers") else list(cuts.cuts)


def _other_numbers(rng: random.Random, folder: Path) -> None:
    """16 and 64 bits, autocast, batches of 0 and 1, odd sizes: what the stock model can run, a plan can."""
    kind = rng.choice((*TOWERS, "timm_dynamic", "timm_dynamic"))
    model = model_of(kind)
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    by_autocast = dtype in (torch.bfloat16, torch.float16) and rng.random() < 0.5
    size = rng.choice(((48, 48), (48, 48), (48, 48), (40, 48), (47, 49), (24, 24), (96, 96), (8, 8)))
    x = images(rng.choice((0, 1, 2, 5)), rng.randrange(100), size)
    context: Callable[[], Any] = nullcontext
    if by_autocast:
        context = lambda: torch.autocast("cpu", dtype)  # noqa: E731
    else:
        model, x = model.to(dtype), x.to(dtype)
    call = call_of(model, kind, x)
    try:
        with torch.no_grad(), context():
            try:
                stock = call()
            except Exception as error:
                stock = error
            with applied(model, rng, kind) as handle:
                _check_against(handle, call, stock, x)
    finally:
        model.float()


def _check_against(handle: Handle, call: Callable[[], Tensor], stock: Any, x: Tensor) -> None:
    if isinstance(stock, Exception):  # a smaller image may have a size that it can run
        try:
            call()
        except (UserError, type(stock), RuntimeError, ValueError, AssertionError):
            assert handle.kept is None, "a failed call left a record"
        return
    try:
        out = call()
    except UserError as error:  # fewer patches than configured, of which none would be left
        check_message(str(error))
        assert "leaves no token" in str(error), str(error)
        return
    assert out.shape == stock.shape and out.dtype == stock.dtype, f"{handle.plan}: {out.shape}, the stock model {stock.shape}"
    assert torch.isfinite(out).all(), f"{handle.plan}: not finite"
    if handle.kept is not None:
        assert len(handle.kept) == len(x) and handle.kept.shape[1] == handle.ledger[-1].tokens_out


ATTACKS = (
    Attack("bad-numbers", "NaN, infinity and huge numbers in images and weights", _bad_input, short=150),
    Attack("number-types", "16 and 64 bits, empty batches, odd sizes", _other_numbers, short=250),
)
