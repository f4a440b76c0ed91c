"""`tokensieve export`: checks, the graph, the comparison with the model, and the file."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

import tokensieve
from tokensieve import files
from tokensieve.cutting.handle import Handle, apply
from tokensieve.errors import UserError, short
from tokensieve.exporting import graph, verify
from tokensieve.exporting.encoders import image_encoder
from tokensieve.exporting.limits import check_plan
from tokensieve.exporting.preprocessing import read_preprocessing
from tokensieve.models import loading
from tokensieve.models.loading.registry import type_of_name
from tokensieve.models.registry import open_tower, open_vlm
from tokensieve.plan import Plan, as_plan

EXAMPLE_BATCH = 2
SUFFIXES = (".onnx", ".pt2")


def run(args: argparse.Namespace) -> Path:
    """Exports a model with a plan; the file."""
    path, plan = Path(args.output), as_plan(args.plan)
    if path.suffix not in SUFFIXES:
        raise UserError(f"--output {short(args.output)}: the name ends in .onnx (ONNX) or .pt2 (torch.export)")
    is_onnx = path.suffix == ".onnx"
    files.check_writable(path)
    graph.check_installed(is_onnx)
    check_plan(plan, depth=12, decoder=0, is_onnx=is_onnx)  # what is known before the model is loaded
    kind = type_of_name(args.model, args.model_type)
    named, weights = ([name] if name is not None else None for name in (args.model, args.pretrained))
    model, pretrained = loading.model_pairs(named, weights, None, kind)[0]
    loading.check_model(model, pretrained, kind)
    loaded = loading.load(model, pretrained, model_type=kind)
    preprocessing = read_preprocessing(loaded.transform)
    vlm = open_vlm(loaded.model)
    tower = open_tower(loaded.model) if vlm is None else vlm.tower
    check_plan(plan, tower.depth if tower else 0, 0 if vlm is None else vlm.decoder.depth, is_onnx)
    with apply(loaded.model, plan, weights=args.weights) as handle:
        encoder = image_encoder(loaded.model, vlm, handle).eval()
        images = torch.zeros(EXAMPLE_BATCH, 3, *preprocessing.image_size)
        with torch.no_grad():
            encoder(images.normal_(generator=torch.Generator().manual_seed(0)))  # errors of the plan, before any graph
        tokens = [dataclasses.asdict(row) for row in handle.ledger]
        program = graph.trace(encoder, images)
        about: dict[str, Any] = {
            "plan": str(plan),
            "model": {"name": model, "pretrained": pretrained, "model_type": kind, "weights": loaded.fingerprint},
            "preprocessing": preprocessing.to_json(),
            "outputs": list(encoder.outputs),
            "tokens": tokens,
            "versions": {"tokensieve": tokensieve.__version__, "torch": torch.__version__},
        }
        content = graph.onnx_file(program, about, encoder.outputs) if is_onnx else graph.program_file(program, about)
        engine = (verify.run_onnx if is_onnx else verify.run_program)(content)
        agreement = verify.compare(engine, encoder, handle, preprocessing.image_size)
        notes = [*loaded.notes, *handle.notes]
    files.replace_file(path, content)
    if not args.quiet:
        print_summary(path, plan, len(content), agreement, handle, notes)
    return path


def print_summary(path: Path, plan: Plan, size: int, agreement: verify.Agreement, handle: Handle, notes: list[str]) -> None:
    """What was written, and how near it is to the model."""
    for note in notes:
        print(f"note: {note}")
    cuts = ", ".join(f"{row.tokens_in} -> {row.tokens_out} at {row.layer}" for row in handle.ledger)
    print(f"{path}: {size / 2**20:.1f} MiB, plan {plan}" + (f", patch tokens {cuts}" if cuts else ""))
    print(
        f"Checked on {agreement.images} random images in batches of {', '.join(map(str, verify.BATCHES))}: the outputs differ "
        f"from the model's by at most {agreement.difference:.1g} of the largest number."
    )
    if agreement.other:
        print(f"For {agreement.other} of them, the engine's rounding decided a near-tie otherwise, so another token was kept.")
