"""Evaluation throughput compared with clip_benchmark's own loop: same model, same image files, interleaved rounds.

    python benchmarks/throughput.py --rounds 4 --output benchmarks/results/throughput_loop.json
    python benchmarks/throughput.py --rounds 3 --whole --output benchmarks/results/throughput_whole.json

Each round runs clip_benchmark's zero-shot loop (fp32, as with --no_amp) and ours: without reduction, then with each plan. Both
include reading and decoding the images and use the same precomputed classifier. Weights are random: only speed is measured.

--whole measures everything `tokensieve eval --plan PLAN` does after loading the model, as reported in its result file
(`run.seconds`): it also counts FLOPs and times the unreduced model on one batch (at least one, then up to 5% of the time). On a
few images these fixed costs dominate.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from clip_benchmark.datasets.builder import build_dataset, get_dataset_collate_fn
from clip_benchmark.metrics.zeroshot_classification import run_classification
from PIL import Image

from tokensieve import cli
from tokensieve.data import registry as data_registry
from tokensieve.evaluation.planned_model import PlannedModel
from tokensieve.files import write_json
from tokensieve.models import loading
from tokensieve.plan import Plan
from tokensieve.provenance import versions
from tokensieve.tasks.zeroshot_classification.task import metrics, record

BASELINE = "clip_benchmark"
DATASET = "fer2013"  # a plain image folder with 7 classes
PLANS = ["none", "anchor(k=10,m=50)", "anchor@2:60"]


def write_images(root: Path, count: int) -> None:
    """Write an image folder in fer2013's layout (7 classes) with 256 x 256 noise images."""
    generator = np.random.default_rng(0)
    for number in range(count):
        folder = root / "test" / str(number % 7)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (256, 256, 3), dtype=np.uint8)).save(folder / f"{number}.png")


def run_clip_benchmark(model: Any, dataset: Any, classifier: torch.Tensor, batch_size: int) -> float:
    """Seconds of clip_benchmark's loop."""
    collate = get_dataset_collate_fn(DATASET)
    loader = torch.utils.data.DataLoader(dataset, batch_size, shuffle=False, num_workers=1, collate_fn=collate)
    start = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        run_classification(model, classifier, loader, "cpu", amp=False)
    return time.perf_counter() - start


def run_loop(model: Any, source: Any, classifier: torch.Tensor, batch_size: int, plan: str) -> float:
    """Seconds of our loop: encode every batch under one plan, score it, compute the metrics."""
    start = time.perf_counter()
    encode = PlannedModel(model, Plan.parse(plan), 0, contextlib.nullcontext)
    records = []
    with torch.inference_mode():
        for batch in source.loader(batch_size, 1):
            features = F.normalize(encode(batch.images, samples=batch.samples), dim=-1)
            records.append(record(100.0 * features @ classifier, batch.targets))
    metrics(records)
    return time.perf_counter() - start


def run_whole(model: str, root: Path, classifier: Path, batch_size: int, plan: str) -> float:
    """Seconds of `tokensieve eval` after loading the model."""
    output = root / "result.json"
    output.unlink(missing_ok=True)
    flags = [
        "--model",
        model,
        "--pretrained",
        "",
        "--dataset",
        DATASET,
        "--dataset_root",
        str(root),
        "--load_clfs",
        str(classifier),
    ]
    flags += ["--plan", plan, "--device", "cpu", "--batch_size", str(batch_size), "--num_workers", "1", "--output", str(output)]
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        code = cli.main(["eval", *flags, "--quiet"])
    if code != 0:
        raise SystemExit(stderr.getvalue())
    seconds: float = json.loads(output.read_text(encoding="utf-8"))["run"]["seconds"]
    return seconds


def measure(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run in every round; each round starts with another run, and the first round is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            elapsed = runs[name]()
            if turn > 0:
                seconds[name].append(elapsed)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16", help="open_clip architecture")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plan", nargs="+", default=PLANS)
    parser.add_argument("--whole", action="store_true", help="measure the whole evaluation, not only its loop")
    parser.add_argument("--output", default="benchmarks/results/throughput_loop.json")
    args = parser.parse_args()

    torch.manual_seed(0)
    loaded = loading.load(args.model, "")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_images(root, args.images)
        dataset = build_dataset(DATASET, root=folder, transform=loaded.transform, split="test", download=False)
        source = data_registry.build_source(DATASET, loaded.transform, root=folder, split="test")
        classifier = torch.randn(loaded.model.visual.output_dim, len(dataset.classes))
        torch.save(classifier, root / "classifier.pt")

        runs: dict[str, Callable[[], float]] = {
            BASELINE: partial(run_clip_benchmark, loaded.model, dataset, classifier, args.batch_size)
        }
        for plan in args.plan:
            if args.whole:
                runs[plan] = partial(run_whole, args.model, root, root / "classifier.pt", args.batch_size, plan)
            else:
                runs[plan] = partial(run_loop, loaded.model, source, classifier, args.batch_size, plan)
        seconds = measure(runs, args.rounds)

    rows = []
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[BASELINE], times, strict=True))
        rows.append({"run": name, "images_per_second": args.images / statistics.median(times), "times_clip_benchmark": ratio})
        print(f"{name:24s} {rows[-1]['images_per_second']:7.2f} images/s   {ratio:5.2f} x clip_benchmark")
    settings = {"model": args.model, "images": args.images, "batch_size": args.batch_size, "rounds": args.rounds}
    write_json(Path(args.output), {**settings, "rows": rows, "versions": versions()})


if __name__ == "__main__":
    main()
