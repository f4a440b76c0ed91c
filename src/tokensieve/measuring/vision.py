"""`tokensieve bench` for models that encode images: how much of the possible speed-up plans reach."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from tokensieve.device import find_device
from tokensieve.errors import UserError
from tokensieve.measuring import encoding
from tokensieve.measuring.break_even import tower_break_even
from tokensieve.measuring.clock import torch_threads
from tokensieve.measuring.results import check_output, publish
from tokensieve.measuring.tables import print_vision_rows
from tokensieve.models import loading
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.models.registry import open_tower
from tokensieve.parts.protocol import Weights
from tokensieve.parts.resolve import read_weights
from tokensieve.plan import Plan

PLAN = "anchor(k=10,m=50)"
BATCHES = (16,)


def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    """`tokensieve bench`; the rows."""
    return run(
        args.model,
        args.pretrained,
        args.plan,
        args.batch_size,
        args.repeats,
        args.device,
        args.output,
        args.quiet,
        image_size=args.image_size,
        model_type=args.model_type,
        weights=args.weights,
        threads=args.threads,
        crossing=args.break_even,
        images=args.images,
    )


def run(
    model: str | None = None,
    pretrained: str = "",
    plans: Sequence[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
    repeats: int = 10,
    device: str | None = None,
    output: str | None = None,
    quiet: bool = False,
    image_size: int | None = None,
    model_type: str = "open_clip",
    weights: Weights = None,
    threads: int | None = None,
    crossing: bool = False,
    images: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Measures every plan at every batch size; prints a table, writes JSON to output, returns the rows.

    model: by default the one that its type declares; weights: of trained methods, as in apply; threads: of torch, by default
    one on the CPU; crossing: also search the number of tokens from which on a plan is faster; images: files, folders and data
    sets of the user, in place of noise.
    """
    parsed = [Plan.parse(plan) for plan in plans or [PLAN]]
    check_output(output)
    where = find_device(device)
    name = model or MODEL_TYPES.get_or_fail(model_type).bench_model

    def build(size: int | None, weights: str = "") -> nn.Module:
        made: nn.Module = loading.architecture(name, weights, size, model_type).to(where).eval()
        return made

    photos: list[Tensor] = []
    if images:
        if image_size is not None:
            raise UserError("--image_size does not go with --images, which the model's own transform resizes; leave it out")
        loaded = loading.load(name, pretrained, model_type=model_type, device=where)
        net, photos = loaded.model, encoding.read_photos(images, loaded.transform, max(batch_sizes or BATCHES))
    else:
        net = build(image_size, pretrained)
    open_tower(net)  # raises here if the model cannot be cut
    if weights is not None and not pretrained:  # random weights match no trained part, but the speed is the same
        weights = {method: loaded.part.to(where) for method, loaded in read_weights(weights).items()}
    about: dict[str, Any] = {"model": name, "model_type": model_type, "pretrained": pretrained or None, "device": str(where)}
    about |= {"images": list(images)} if images else {}
    sizes, rows = batch_sizes or BATCHES, []
    with torch_threads(threads, where):
        for batch_size in sizes:
            batch = encoding.batch_of(photos, batch_size).to(where) if photos else encoding.noise_images(net, batch_size)
            rows += [about | row for row in encoding.measure(net, batch, parsed, repeats, quiet, weights)]
        find = partial(tower_break_even, net, build, weights=weights, quiet=quiet)
        points = [find(plan, sizes) for plan in parsed] if crossing else []
        publish(rows, output, quiet, print_vision_rows, break_even=points)
    return rows
