"""`tokensieve bench --model_type vlm`: phases, FLOPs and caches of a vision-language model, and its break-even point."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokensieve import files, provenance
from tokensieve.device import find_device
from tokensieve.errors import UserError
from tokensieve.measuring.break_even import break_even
from tokensieve.measuring.generation import BATCHES, PLAN, measure, prompts
from tokensieve.measuring.rounds import detached_handle
from tokensieve.measuring.tables import print_break_even, print_vlm_rows
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan


def bench(args: argparse.Namespace) -> None:
    """`tokensieve bench` for vision-language models."""
    for flag in ("pretrained", "image_size"):
        if getattr(args, flag):
            raise UserError(f"--{flag} does not go with --model_type vlm: the model's own weights and image size are measured.")
    run(
        args.model,
        args.plan,
        args.batch_size,
        args.repeats,
        args.new_tokens,
        args.text_tokens,
        args.device,
        args.output,
        args.quiet,
        weights=args.weights,
        crossing=args.break_even,
    )


def run(
    model: str | None = None,
    plans: Sequence[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
    repeats: int = 10,
    new_tokens: int = 16,
    text_tokens: int = 16,
    device: str | None = None,
    output: str | None = None,
    quiet: bool = False,
    weights: Weights = None,
    crossing: bool = False,
) -> list[dict[str, Any]]:
    """Measures every plan at every batch size; prints tables, writes JSON to output, returns the rows.

    model: a folder or a Hub id, by default the embedded LLaVA; crossing: also search the break-even point.
    """
    parsed = [Plan.parse(plan) for plan in plans or [PLAN]]
    if output is not None:
        files.check_writable(Path(output))
    where = find_device(device)
    name = model or MODEL_TYPES["vlm"].bench_model
    net = load_vlm.load(name, where).model
    about = {"model": name, "model_type": "vlm", "device": str(where)}
    rows, points = [], []
    for plan in parsed:
        handle = detached_handle(net, plan, weights)
        for batch_size in batch_sizes or BATCHES:
            row = measure(net, prompts(net, batch_size, text_tokens), handle, repeats, new_tokens, quiet=quiet)
            rows.append(about | row)
        if crossing:
            points.append(break_even(net, handle, batch_sizes or BATCHES, text_tokens=text_tokens, quiet=quiet))
    if output is not None:
        content = {"rows": rows, "break_even": points, "versions": provenance.versions()}
        files.replace_file(Path(output), files.json_bytes(content))
    if not quiet:
        print_vlm_rows(rows)
        print_break_even(points)
    return rows
