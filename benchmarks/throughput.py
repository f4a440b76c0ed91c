"""Evaluation throughput against clip_benchmark's own loop: same model, same images on disk, interleaved rounds.

    python benchmarks/throughput.py --rounds 4 --output benchmarks/results/throughput_loop.json
    python benchmarks/throughput.py --rounds 3 --whole --output benchmarks/results/throughput_whole.json

Each round runs clip_benchmark's zero-shot loop (fp32 as with --no_amp) and ours, without reduction and with each plan, reading
and decoding included. --whole measures all that `tokensieve eval --plan PLAN` does once the model is loaded: counting FLOPs,
timing the unreduced model on a batch (at least one, then up to a twentieth of the time) and writing the result; on so few
images these one-off costs weigh much. Both sides get the same ready classifier. Weights are random: speed only.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from clip_benchmark.datasets.builder import build_dataset, get_dataset_collate_fn
from clip_benchmark.metrics.zeroshot_classification import run_classification
from PIL import Image

from tokensieve import cli
from tokensieve.data import registry as data_registry
from tokensieve.evaluation import jobs, notices, run
from tokensieve.files import write_json
from tokensieve.models import loading
from tokensieve.plan import Plan
from tokensieve.provenance import versions

PLANS = ["none", "anchor(k=10,m=50)", "anchor@2:60"]


def write_images(root: Path, count: int) -> None:
    """An image folder in fer2013's layout (7 classes), of 256 x 256 noise."""
    draw = np.random.default_rng(0)
    for number in range(count):
        folder = root / "test" / str(number % 7)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (256, 256, 3), dtype=np.uint8)).save(folder / f"{number}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plan", nargs="+", default=PLANS)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--output", default="benchmarks/results/throughput_loop.json")
    args = parser.parse_args()

    torch.manual_seed(0)
    loaded = loading.load(args.model, "")
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), args.images)
        theirs = build_dataset("fer2013", root=folder, transform=loaded.transform, split="test", download=False)

        classifier = torch.randn(loaded.model.visual.output_dim, len(theirs.classes))
        torch.save(classifier, f"{folder}/classifier.pt")

        def upstream() -> None:
            collate = get_dataset_collate_fn("fer2013")
            loader = torch.utils.data.DataLoader(theirs, args.batch_size, shuffle=False, num_workers=1, collate_fn=collate)
            with contextlib.redirect_stderr(io.StringIO()):
                run_classification(loaded.model, classifier, loader, "cpu", amp=False)

        ours = data_registry.build_source("fer2013", loaded.transform, root=folder, split="test")

        def loop(plan: str) -> None:
            arm = evaluate.Arm(loaded.model, Plan.parse(plan), 0, contextlib.nullcontext)
            batches = ((batch.images, batch.targets) for batch in ours.loader(args.batch_size, 1))
            classification.evaluate([arm], batches, classifier, contextlib.nullcontext)

        def whole(plan: str) -> None:
            flags = ["--dataset_root", folder, "--batch_size", str(args.batch_size), "--num_workers", "1", "--quiet"]
            flags += ["--load_clfs", f"{folder}/classifier.pt"]
            given = cli.parse(["eval", "--dataset", "fer2013", "--model", args.model, *flags])
            file = {str(Plan.parse(plan)): Path(folder) / "result.json"}
            job = jobs.Job(args.model, "", "fer2013", "en", "zeroshot_classification", file)
            with contextlib.redirect_stderr(io.StringIO()):
                say = notices.WarnOnce()
                run.run_job(job, [Plan.parse(plan)], loaded, given, torch.device("cpu"), say, show=False)

        sieved = whole if args.whole else loop
        runs = {"clip_benchmark": upstream} | {plan: (lambda plan=plan: sieved(plan)) for plan in args.plan}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(args.rounds + 1):
            names = list(runs)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                start = time.perf_counter()
                runs[name]()
                if turn:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["clip_benchmark"], times, strict=True))
        rows.append({"run": name, "images_per_second": args.images / statistics.median(times), "times_clip_benchmark": ratio})
        print(f"{name:24s} {rows[-1]['images_per_second']:7.2f} images/s   {ratio:5.2f} x clip_benchmark")
    settings = {"model": args.model, "images": args.images, "batch_size": args.batch_size, "rounds": args.rounds}
    write_json(Path(args.output), {**settings, "rows": rows, "versions": versions()})


if __name__ == "__main__":
    main()
