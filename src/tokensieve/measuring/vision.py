"""How much of the possible speed a plan really gives: full model, plan and oracle, timed in one interleaved run.

The oracle runs the same blocks on the same numbers of tokens, chosen at no cost (the first ones). What a plan reaches of
the oracle's speed-up is its realized fraction; the rest is what choosing costs. In each round every variant runs once, in
an order that rotates from round to round; ratios are medians over the rounds of ratios within a round, so that a machine
that slows down for a while slows all of them.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.cutting.handle import Handle, apply
from tokensieve.device import find_device, timed
from tokensieve.errors import PlanWarning
from tokensieve.measuring.flops import gflops
from tokensieve.measuring.memory import peak_memory
from tokensieve.methods.registry import describe
from tokensieve.models.features import encode_image
from tokensieve.models.registry import open_tower
from tokensieve.parts.protocol import Weights
from tokensieve.parts.resolve import read_weights
from tokensieve.plan import Budget, Plan, Step, Where

BASE = {"open_clip": "ViT-B-16", "hf": "clip-vit-base-patch16", "timm": "vit_base_patch16_224"}


def first(view: View, keep: int) -> Reduction:
    """The first tokens: a choice that costs nothing."""
    index = torch.arange(keep, device=view.tokens.device).expand(view.tokens.shape[0], -1)
    return Reduction(index=index, n=view.n)


def oracle(handle: Handle) -> Plan:
    """The plan that cuts where the handle's last batch was cut, to the same numbers of tokens, at no cost."""
    method = describe(first)
    cuts = [row for row in handle.ledger if row.tokens_out < row.tokens_in]
    return Plan(tuple(Step(method, Where.parse(row.layer), Budget("keep", Fraction(row.tokens_out))) for row in cuts))


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

    model: by default the ViT-B/16 of its type; weights: of methods that are trained, as in apply.
    """
    from tokensieve import files, provenance
    from tokensieve.models import loading

    parsed = [Plan.parse(plan) for plan in plans or ["anchor(k=10,m=50)"]]
    if output is not None:
        files.check_writable(Path(output))
    place = find_device(device)
    model = model or BASE.get(model_type, "")
    net = loading.architecture(model, pretrained, image_size, model_type).to(place).eval()
    height, width = open_tower(net).image_size  # what cannot be cut says so here
    if weights is not None and not pretrained:  # with random weights no trained part is this model's own; speed is the same
        weights = {name: one.part.to(place) for name, one in read_weights(weights).items()}
    rows = []
    for batch_size in batch_sizes or [16]:
        images = torch.randn(batch_size, 3, height, width, generator=torch.Generator().manual_seed(0)).to(place)
        for row in measure(net, images, parsed, repeats, quiet, weights):
            about = {"model": model, "model_type": model_type, "pretrained": pretrained or None, "device": str(place)}
            rows.append(about | row)
    if output is not None:
        if Path(output).exists():
            files.back_up(Path(output))
        files.write_json(Path(output), {"rows": rows, "versions": provenance.versions()})
    if not quiet:
        _print_table(rows)
    return rows


def measure(
    net: nn.Module, images: Tensor, plans: list[Plan], repeats: int, quiet: bool = True, weights: Weights = None
) -> list[dict[str, Any]]:
    """One row a plan for this batch of images (B, 3, h, w)."""
    from tqdm import trange

    def encode(handle: Handle | None) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                if handle is None:
                    return encode_image(net, images)
                with handle:
                    return encode_image(net, images)

        return call

    handles = [_fresh(net, plan, weights) for plan in plans]
    for handle in handles:
        encode(handle)()
    oracles = [_fresh(net, oracle(handle)) for handle in handles]
    calls = [encode(handle) for handle in (None, *handles, *oracles)]
    for call in calls:  # warm-up
        call()
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in trange(repeats, desc=f"batch {len(images)}", unit="round", disable=quiet, leave=False):
        for number in [(turn + i) % len(calls) for i in range(len(calls))]:
            seconds[number].append(timed(calls[number], images.device)[1])
    peaks = [peak_memory(call, images.device) for call in [calls[0], *(encode(_fresh(net, plan, weights)) for plan in plans)]]
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
                "seconds_full": statistics.median(full),
                "seconds": statistics.median(reduced[i]),
                "seconds_oracle": statistics.median(ideal_times[i]),
                "speedup": _ratio(full, reduced[i]),
                "speedup_oracle": _ratio(full, ideal_times[i]),
                "realized": _ratio(ideal_times[i], reduced[i]),
                "gflops_full": cost_full,
                "gflops": cost,
                "peak_mib_full": peaks[0],
                "peak_mib": peaks[1 + i],
                "repeats": repeats,
                "notes": handles[i].notes,
            }
        )
    return rows


def _fresh(net: nn.Module, plan: Plan, weights: Weights = None) -> Handle:
    """A handle that holds nothing of earlier batches, off the model; its notes are in the rows, so it says nothing."""
    trained = plan.is_trained
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        with apply(net, plan, weights=weights if trained else None) as handle:
            return handle


def _ratio(slow: list[float], fast: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"{rows[0]['model']} on {rows[0]['device']}, medians of {rows[0]['repeats']} interleaved rounds"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), collapse_padding=True)
    table.pad_edge = False
    table.add_column("plan", overflow="fold", min_width=14)
    heads = ("B", "seconds: full\n/plan/oracle", "speed\n-up", "its\noracle", "real-\nized", "GFLOPs", "peak\nMiB")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        peak = "-" if row["peak_mib"] is None else f"{row['peak_mib_full']:.0f}>{row['peak_mib']:.0f}"
        table.add_row(
            row["plan"],
            str(row["batch_size"]),
            "/".join(f"{row[key]:.3g}" for key in ("seconds_full", "seconds", "seconds_oracle")),
            *(f"{row[key]:.2f}x" for key in ("speedup", "speedup_oracle")),
            f"{row['realized']:.3f}",
            f"{row['gflops_full']:.3g}>{row['gflops']:.3g}",
            peak,
        )
    Console().print(table)
