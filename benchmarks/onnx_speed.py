"""Exported towers with a plan in ONNX Runtime: how much faster than the exported full tower, by CPU time of one thread.

    python benchmarks/onnx_speed.py     # ViT-B/16 with random weights, batch 1 and 16

Every plan is one exported file, as `tokensieve export` writes it. Its calls take turns with those of the full tower's file.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import open_clip
import torch

import tokensieve
from tokensieve import files, provenance
from tokensieve.exporting import graph, verify
from tokensieve.exporting.encoders import ImageEncoder

MODEL, SIDE = "ViT-B-16", 224
PLANS = ("random@6:49", "anchor@6:49", "cover@6:49", "tome")
DEFAULT = Path(__file__).parent / "results" / "onnx_speed.json"


def exported(model: Any, plan: str) -> tuple[Any, float]:
    """A session of one thread with the tower under a plan, and its difference from the model."""
    with tokensieve.apply(model, plan) as handle:
        encoder = ImageEncoder(model).eval()
        content = graph.onnx_file(graph.trace(encoder, torch.zeros(2, 3, SIDE, SIDE)), {"plan": plan}, encoder.outputs)
        agreement = verify.compare(verify.run_onnx(content), encoder, handle, (SIDE, SIDE))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"]), agreement.difference


def measure(full: Any, session: Any, batch: int, rounds: int) -> dict[str, Any]:
    """Seconds of both sessions in interleaved rounds, after one warm-up call of each."""
    images = {"images": np.random.default_rng(0).standard_normal((batch, 3, SIDE, SIDE), dtype=np.float32)}
    sessions = {"full": full, "plan": session}
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for each in sessions.values():
        each.run(None, images)
    for number in range(rounds):
        for name in sorted(sessions, reverse=bool(number % 2)):
            begin = time.thread_time()
            sessions[name].run(None, images)
            seconds[name].append(time.thread_time() - begin)
    ratios = sorted(slow / fast for slow, fast in zip(seconds["full"], seconds["plan"], strict=True))
    return {
        "batch_size": batch,
        "seconds_full": statistics.median(seconds["full"]),
        "seconds": statistics.median(seconds["plan"]),
        "speedup": statistics.median(ratios),
        "speedup_low": ratios[len(ratios) // 4],
        "speedup_high": ratios[-1 - len(ratios) // 4],
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT)
    parser.add_argument("--plan", nargs="+", default=list(PLANS))
    parser.add_argument("--batch_size", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = open_clip.create_model(MODEL).visual.eval()
    full, _ = exported(model, "none")
    rows = []
    for plan in args.plan:
        session, difference = exported(model, plan)
        for batch in args.batch_size:
            rows.append({"model": MODEL, "plan": plan, "difference": difference} | measure(full, session, batch, args.rounds))
            print(f"batch {batch}, {plan}: {rows[-1]['speedup']:.2f}x", flush=True)
    versions = provenance.versions() | {"onnxruntime": onnxruntime.__version__}
    files.write_json(args.output, {"rows": rows, "versions": versions})


if __name__ == "__main__":
    main()
