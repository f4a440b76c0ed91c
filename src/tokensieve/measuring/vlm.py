"""`tokensieve bench --model_type vlm`: phases, FLOPs and caches of a vision-language model, and its break-even point."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from tokensieve.device import find_device
from tokensieve.errors import UserError
from tokensieve.measuring.break_even import break_even
from tokensieve.measuring.clock import torch_threads
from tokensieve.measuring.generation import BATCHES, PLAN, measure_all, prompts
from tokensieve.measuring.results import check_output, publish
from tokensieve.measuring.rounds import detached_handle
from tokensieve.measuring.tables import print_vlm_rows
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan


def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    """`tokensieve bench` for vision-language models; the rows."""
    if args.images:
        raise UserError(
            "--images does not go with --model_type vlm, whose bench takes noise: times do not depend on what an image shows. "
            "For your images and questions use eval --dataset csv:FILE."
        )
    for flag in ("pretrained", "image_size"):
        if getattr(args, flag):
            raise UserError(f"--{flag} does not go with --model_type vlm: the model's own weights and image size are measured.")
    return run(
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
        threads=args.threads,
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
    threads: int | None = None,
    crossing: bool = False,
) -> list[dict[str, Any]]:
    """Measures every plan at every batch size; prints tables, writes JSON to output, returns the rows.

    model: a folder or a Hub id, by default the embedded LLaVA; threads: of torch, by default one on the CPU; crossing: also
    search the number of vision tokens from which on a plan is faster.
    """
    parsed = [Plan.parse(plan) for plan in plans or [PLAN]]
    check_output(output)
    where = find_device(device)
    name = model or MODEL_TYPES["vlm"].bench_model
    net = load_vlm.load(name, where).model
    about = {"model": name, "model_type": "vlm", "device": str(where)}
    handles = [detached_handle(net, plan, weights) for plan in parsed]
    sizes, rows = batch_sizes or BATCHES, []
    with torch_threads(threads, where):
        for batch_size in sizes:
            inputs = prompts(net, batch_size, text_tokens)
            rows += [about | row for row in measure_all(net, inputs, handles, repeats, new_tokens, quiet=quiet)]
        find = partial(break_even, net, batch_sizes=sizes, text_tokens=text_tokens, quiet=quiet)
        points = [find(handle) for handle in handles] if crossing else []
        publish(rows, output, quiet, print_vlm_rows, break_even=points)
    return rows
