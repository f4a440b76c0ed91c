"""Measuring a model that encodes images with and without plans: full model, plans and their oracles in interleaved rounds.

The share of the oracle's speed-up that a plan reaches is its realized fraction; the rest is the cost of choosing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.data.images import BrokenImage, open_photo
from tokensieve.data.own.files import list_files
from tokensieve.data.source import Inputs
from tokensieve.errors import UserError, short
from tokensieve.measuring.clock import counts_cpu_time
from tokensieve.measuring.flops import gflops
from tokensieve.measuring.memory import peak_memory
from tokensieve.measuring.oracle import oracle
from tokensieve.measuring.rounds import Ratio, Variant, detached_handle, interleaved
from tokensieve.models.features import encode_image
from tokensieve.models.registry import open_tower
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan
from tokensieve.terminal import progress


def noise_images(net: nn.Module, batch_size: int) -> Tensor:
    """Random images of the size that a model takes, on its device: (B, 3, h, w)."""
    shape = (batch_size, 3, *open_tower(net).image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(next(net.parameters()).device)


def read_photos(names: Sequence[str], transform: Callable[[Any], Tensor], most: int) -> list[Tensor]:
    """The first images of the user, as the model takes them: (3, h, w) each. Those that cannot be read are left out."""
    photos: list[Tensor] = []
    for file in list_files(names):
        if len(photos) == most:
            break
        try:
            photos.append(transform(open_photo(file)))
        except BrokenImage as error:
            print(f"tokensieve: cannot read {short(file, 200)}: {short(error, 300)}", file=sys.stderr)
    if not photos:
        raise UserError(f"--images {short(' '.join(names), 200)}: there is no image that can be read")
    return photos


def batch_of(photos: Sequence[Tensor], batch_size: int) -> Tensor:
    """So many images (B, 3, h, w); if there are fewer, they are repeated."""
    return torch.stack([photos[number % len(photos)] for number in range(batch_size)])


def measure(
    net: nn.Module,
    images: Inputs,
    plans: list[Plan],
    repeats: int,
    quiet: bool = True,
    weights: Weights = None,
    run: Callable[[Any, Any], Tensor] = encode_image,
) -> list[dict[str, Any]]:
    """One row for each plan, for this batch of images (B, 3, h, w), or of inputs by name, each (B, ...).

    run: (net, images), what is measured.
    """
    some = images if isinstance(images, Tensor) else next(iter(images.values()))
    first = images[:1] if isinstance(images, Tensor) else {name: value[:1] for name, value in images.items()}
    device, tower, batch_size = some.device, open_tower(net), len(some)

    @torch.no_grad()
    def encode() -> Tensor:
        return run(net, images)

    handles = [detached_handle(net, plan, weights) for plan in plans]
    cost_full = gflops(lambda: run(net, first))  # and warm-up
    variants = [Variant(encode), *(Variant(encode, handle) for handle in handles)]
    peaks = [peak_memory(encode, device)]
    for handle in handles:  # they hold nothing of earlier batches
        with handle:
            peaks.append(peak_memory(encode, device))
    oracles = [Variant(encode, detached_handle(net, oracle(handle))) for handle in handles]
    for ideal in oracles:  # warm-up; that of the others was measured
        ideal.run()
    rounds = progress.bar(range(repeats), desc=f"batch {batch_size}", unit="round", quiet=quiet, leave=False)
    times = interleaved([*variants, *oracles], device, rounds)
    full, *others = ([each.counted(device) for each in series] for series in times)
    walls = [statistics.median(each.wall for each in series) for series in times]
    rows = []
    for i, plan in enumerate(plans):
        reduced, ideal_times = others[i], others[len(plans) + i]
        layers, changed = [vars(row) for row in handles[i].ledger], handles[i].has_cut
        with handles[i]:
            cost = gflops(lambda: run(net, first))
        rows.append(
            {
                "plan": str(plan),
                "batch_size": batch_size,
                "vision_tokens": tower.grid[0] * tower.grid[1],
                "layers": layers,
                "changed": changed,
                "clock": "cpu" if counts_cpu_time(device) else "wall",
                "seconds_full": statistics.median(full),
                "seconds": statistics.median(reduced),
                "seconds_oracle": statistics.median(ideal_times),
                "wall_seconds_full": walls[0],
                "wall_seconds": walls[1 + i],
                "wall_seconds_oracle": walls[1 + len(plans) + i],
                **Ratio.of(full, reduced).entries("speedup"),
                **Ratio.of(full, ideal_times).entries("speedup_oracle"),
                **Ratio.of(ideal_times, reduced).entries("realized"),
                "gflops_full": cost_full,
                "gflops": cost,
                "peak_mib_full": peaks[0],
                "peak_mib": peaks[1 + i],
                "repeats": repeats,
                "notes": handles[i].notes,
            }
        )
    return rows
