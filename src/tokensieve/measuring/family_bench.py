"""`tokensieve bench --model_type vlm --family`: prefill and decode steps of every family under plans, beside their oracles.

Models have random weights, so that any number of image tokens can be measured. What a projector hands over is computed once and
handed over again in every round: its time is the same under all plans, and the tower of some families takes most of it. Where
a plan cuts in the tower itself (LLaVA, PaliGemma), a tiny tower runs in every round.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tokensieve.device import find_device, to_device
from tokensieve.errors import UserError
from tokensieve.measuring import family_models, generation
from tokensieve.measuring.clock import describe_machine, torch_threads
from tokensieve.measuring.phases import open_model
from tokensieve.measuring.results import check_output, warn, write
from tokensieve.measuring.rounds import detached_handle
from tokensieve.measuring.tables import print_family_rows
from tokensieve.models.patching import set_attribute
from tokensieve.models.vlm import Vlm
from tokensieve.plan import Plan

ALL = "all"
PLANS = ("grid@out:25%", "grid@llm.2:25%")
TOKENS = (576, 2304, 9216)
QUICK_TOKENS = (64,)
WIDTH, QUICK_WIDTH = 1024, 64
OTHERS = ("model", "pretrained", "image_size", "images", "weights", "break_even", "suite", "batch_size")  # flags without effect


def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    """`tokensieve bench --model_type vlm --family`; the rows."""
    for flag in OTHERS:
        if getattr(args, flag):
            raise UserError(f"--{flag} does not go with --family, which makes its own models and prompts; leave it out")
    families = family_models.names() if ALL in args.family else [family_models.check(name) for name in args.family]
    tokens = args.vision_tokens or (QUICK_TOKENS if args.quick else TOKENS)
    width = args.width or (QUICK_WIDTH if args.quick else WIDTH)
    if width % family_models.HEAD:
        raise UserError(f"--width {width} is no multiple of {family_models.HEAD}, the width of a head")
    repeats = 1 if args.quick else args.repeats
    return run(families, args.plan, tokens, width, repeats, args.new_tokens, args.device, args.output, args.quiet, args.threads)


def run(
    families: Sequence[str],
    plans: Sequence[str] | None = None,
    tokens: Sequence[int] = TOKENS,
    width: int = WIDTH,
    repeats: int = 5,
    new_tokens: int = 8,
    device: str | None = None,
    output: str | None = None,
    quiet: bool = False,
    threads: int | None = None,
) -> list[dict[str, Any]]:
    """Measures families at numbers of image tokens; prints a table, writes JSON after each model, returns the rows."""
    parsed = [Plan.parse(plan) for plan in plans or PLANS]
    check_output(output)
    where = find_device(device)
    rows: list[dict[str, Any]] = []
    with torch_threads(threads, where):
        jobs = [(count, name) for count in tokens for name in families]
        for number, (count, name) in enumerate(jobs, start=1):
            if not quiet:
                print(f"tokensieve: [{number}/{len(jobs)}] {name}, {count} tokens", file=sys.stderr, flush=True)
            model, inputs = family_models.build(name, count, width)
            model, inputs = model.to(where), to_device(inputs, where)
            vlm = open_model(model)
            with _constant_features(vlm, inputs):
                handles = [detached_handle(model, plan) for plan in parsed]
                found = generation.measure_all(model, inputs, handles, repeats, new_tokens, what={"oracle"}, quiet=quiet)
            title = name.capitalize() if name in family_models.OTHERS else vlm.family
            about = {"model": title, "model_type": "vlm", "family": name, "width": width, "device": str(where)}
            rows += [about | row for row in found]
            machine = describe_machine(rows)
            write(output, {"rows": rows, "machine": machine}, goes_on=number > 1)
    if not quiet:
        print_family_rows(sorted(rows, key=lambda row: families.index(row["family"])))
    warn(machine)
    return rows


@contextmanager
def _constant_features(vlm: Vlm, inputs: family_models.Inputs) -> Iterator[None]:
    """Inside the `with` block the model's projector hands over what it makes of these inputs, without being run again."""
    if not vlm.out_is_projected:
        yield
        return
    method = vlm.inner.get_image_features
    made: list[Any] = []

    @functools.wraps(method)
    def features(*args: Any, **kwargs: Any) -> Any:
        if not made:
            with torch.no_grad():
                made.append(method(*args, **kwargs))
        return type(made[0])(**made[0])

    undo = set_attribute(vlm.inner, "get_image_features", features)
    try:
        yield
    finally:
        undo()
