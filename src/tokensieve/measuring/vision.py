"""`tokensieve bench`: how much of the possible speed-up a plan reaches. Full model, plan and oracle run in interleaved rounds.

The oracle runs the same blocks on the same numbers of tokens, chosen at no cost (the first ones). The share of the oracle's
speed-up that a plan reaches is its realized fraction; the rest is the cost of choosing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve import files, provenance
from tokensieve.core import Reduction, View
from tokensieve.cutting.handle import Handle
from tokensieve.cutting.passes import IMAGE
from tokensieve.device import find_device
from tokensieve.measuring.flops import gflops
from tokensieve.measuring.memory import peak_memory
from tokensieve.measuring.rounds import detached_handle, interleaved_seconds, median_ratio
from tokensieve.measuring.tables import print_vision_rows
from tokensieve.methods.registry import describe
from tokensieve.models import loading
from tokensieve.models.features import encode_image
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.models.registry import open_tower
from tokensieve.parts.protocol import Weights
from tokensieve.parts.resolve import read_weights
from tokensieve.plan import Budget, Plan, Step, Where


def first(view: View, keep: int) -> Reduction:
    """The first tokens: a choice that costs nothing."""
    index = torch.arange(keep, device=view.tokens.device).expand(view.tokens.shape[0], -1)
    return Reduction(index=index, n=view.n)


def oracle(handle: Handle) -> Plan:
    """The plan that cuts where the handle's last batch was cut, to the same numbers of tokens, at no cost."""
    method = describe(first)
    image_steps = [step for step in handle.plan.steps if step.method.on_image]  # a smaller image is no choice of tokens
    cuts = [row for row in handle.ledger if row.tokens_out < row.tokens_in and row.layer != IMAGE]
    steps = (Step(method, Where.parse(row.layer), Budget("keep", Fraction(row.tokens_out))) for row in cuts)
    return Plan((*image_steps, *steps))


def bench(args: argparse.Namespace) -> None:
    """`tokensieve bench` for models that encode images."""
    run(
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
    )


def run(
    model: str | None = None,
    pretrained: str = "",
    plans: list[str] | None = None,
    batch_sizes: list[int] | None = None,
    repeats: int = 10,
    device: str | None = None,
    output: str | None = None,
    quiet: bool = False,
    image_size: int | None = None,
    model_type: str = "open_clip",
    weights: Weights = None,
) -> list[dict[str, Any]]:
    """Measures every plan at every batch size; prints a table, writes JSON to output, returns the rows.

    model: by default the one that its type declares; weights: of trained methods, as in apply.
    """
    parsed = [Plan.parse(plan) for plan in plans or ["anchor(k=10,m=50)"]]
    if output is not None:
        files.check_writable(Path(output))
    where = find_device(device)
    model = model or MODEL_TYPES.get_or_fail(model_type).bench_model
    net = loading.architecture(model, pretrained, image_size, model_type).to(where).eval()
    height, width = open_tower(net).image_size  # raises here if the model cannot be cut
    if weights is not None and not pretrained:  # random weights match no trained part, but the speed is the same
        weights = {name: loaded.part.to(where) for name, loaded in read_weights(weights).items()}
    rows = []
    for batch_size in batch_sizes or [16]:
        images = torch.randn(batch_size, 3, height, width, generator=torch.Generator().manual_seed(0)).to(where)
        for row in measure(net, images, parsed, repeats, quiet, weights):
            about = {"model": model, "model_type": model_type, "pretrained": pretrained or None, "device": str(where)}
            rows.append(about | row)
    if output is not None:
        content = {"rows": rows, "versions": provenance.versions()}
        files.replace_file(Path(output), files.json_bytes(content))
    if not quiet:
        print_vision_rows(rows)
    return rows


def measure(
    net: nn.Module, images: Tensor, plans: list[Plan], repeats: int, quiet: bool = True, weights: Weights = None
) -> list[dict[str, Any]]:
    """One row for each plan, for this batch of images (B, 3, h, w)."""
    from tqdm import trange

    def encode(handle: Handle | None) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                if handle is None:
                    return encode_image(net, images)
                with handle:
                    return encode_image(net, images)

        return call

    handles = [detached_handle(net, plan, weights) for plan in plans]
    for handle in handles:
        encode(handle)()
    oracles = [detached_handle(net, oracle(handle)) for handle in handles]
    calls = [encode(handle) for handle in (None, *handles, *oracles)]
    for call in calls:  # warm-up
        call()
    rounds = trange(repeats, desc=f"batch {len(images)}", unit="round", disable=quiet, leave=False)
    seconds = interleaved_seconds(calls, images.device, rounds)
    unused = [encode(detached_handle(net, plan, weights)) for plan in plans]  # they hold nothing of earlier batches
    peaks = [peak_memory(call, images.device) for call in (calls[0], *unused)]
    full, reduced, ideal_times = seconds[0], seconds[1 : 1 + len(plans)], seconds[1 + len(plans) :]
    cost_full = gflops(lambda: encode_image(net, images[:1]))
    rows = []
    for i, plan in enumerate(plans):
        with handles[i]:
            cost = gflops(lambda: encode_image(net, images[:1]))
        rows.append(
            {
                "plan": str(plan),
                "batch_size": len(images),
                "layers": [vars(row) for row in handles[i].ledger],
                "changed": handles[i].has_cut,
                "seconds_full": statistics.median(full),
                "seconds": statistics.median(reduced[i]),
                "seconds_oracle": statistics.median(ideal_times[i]),
                "speedup": median_ratio(full, reduced[i]),
                "speedup_oracle": median_ratio(full, ideal_times[i]),
                "realized": median_ratio(ideal_times[i], reduced[i]),
                "gflops_full": cost_full,
                "gflops": cost,
                "peak_mib_full": peaks[0],
                "peak_mib": peaks[1 + i],
                "repeats": repeats,
                "notes": handles[i].notes,
            }
        )
    return rows
