"""`tokensieve bench` for re-identification models: objects in all modalities of the model, with noise for images."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from tokensieve import embedded
from tokensieve.device import find_device
from tokensieve.errors import UserError
from tokensieve.measuring import encoding
from tokensieve.measuring.clock import torch_threads
from tokensieve.measuring.results import check_output, publish
from tokensieve.measuring.tables import print_vision_rows
from tokensieve.plan import Plan
from tokensieve.reid import loading
from tokensieve.reid.model import ReidModel

BATCHES = (16,)


def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    """`tokensieve bench`; the rows. Default plan: the one that the model was trained with."""
    for flag, value in (("--break_even", args.break_even), ("--image_size", args.image_size)):
        if value:
            raise UserError(
                f"{flag} works with models of one image: a re-identification model has a fixed shape; leave it out."
            )
    check_output(args.output)
    plans = [Plan.parse(text) for text in args.plan or ()]
    name, device = args.model or embedded.REID, find_device(args.device)
    model = loading.load(name, device, pretrained=args.pretrained).model
    if not plans and model.plan == "none":
        raise UserError(f"{name} was trained without a plan: give --plan, for example anchor@out:50%")
    plans = plans or [Plan.parse(model.plan)]
    about = {"model": name, "model_type": "reid", "pretrained": None, "device": str(device)}
    rows: list[dict[str, Any]] = []
    with torch_threads(args.threads, device):
        for batch_size in args.batch_size or BATCHES:
            inputs = noise_objects(model, batch_size)
            made = encoding.measure(model, inputs, plans, args.repeats, args.quiet, args.weights, run=_encode)
            rows += [about | row for row in made]
        publish(rows, args.output, args.quiet, print_vision_rows, break_even=[])
    return rows


def noise_objects(model: ReidModel, batch_size: int) -> dict[str, Tensor]:
    """Random images (B,3,h,w) by modality, and cameras (B,), on the device of the model."""
    draws = torch.Generator().manual_seed(0)
    device, shape = next(model.parameters()).device, (batch_size, 3, *model.settings.image_size)
    images = {name: torch.randn(shape, generator=draws).to(device) for name in model.modalities}
    return {**images, "cameras": torch.zeros(batch_size, dtype=torch.int64, device=device)}


def _encode(model: ReidModel, inputs: dict[str, Tensor]) -> Tensor:
    return model.encode(inputs)
