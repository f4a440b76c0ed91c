"""What it costs to encode very many images with and without a plan: arithmetic on measured times, for docs/scale.md.

python benchmarks/scale.py     # prints both tables; tables.py writes them into the page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PLANS = ("none", "resize(size=192) + cover@7:40", "2x", "cover:32", "resize(size=160) + cover@7:40", "tome:-16")
MODEL, BATCH = "ViT-B-16", 16
MILLION, BILLION = 10**6, 10**9
# Assumptions. Whoever has other prices changes them here.
CORES = 64  # of a machine
MACHINES = 100
DOLLARS = 0.04  # of an hour of a core
WIDTH = 512  # numbers of a feature, float32


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def tower_seconds() -> float:
    """CPU seconds of one core for an image in the full tower."""
    rows = read("bench_suite.json")["rows"]
    full = {row["seconds_full"] for row in rows if (row["model"], row["batch_size"], row["kind"]) == (MODEL, BATCH, "tower")}
    (seconds,) = full  # one round is shared by all plans
    return float(seconds) / BATCH


def reading_seconds() -> float:
    return float(read("reading_time.json")["seconds"])


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---" if i == 0 else "---:" for i in range(len(head))) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def costs() -> str:
    """The costs of a million and of a billion images."""
    measured = {row["plan"]: row for row in read("equal_time_clip.json")["rows"]}
    full = tower_seconds() + reading_seconds()
    rows = []
    for plan in PLANS:
        row = measured[plan]
        seconds = tower_seconds() / row["speedup"] + reading_seconds()
        hours = seconds / 3600
        lost = "" if plan == "none" else f"{100 * row['lost']:.1f} ± {100 * row['lost_stderr']:.1f}"
        cells = [f"{seconds:.3f} s", f"{full / seconds:.2f}x", lost]
        cells += [f"{MILLION * hours:,.0f}", f"{MILLION * hours / CORES:.1f} h", f"${MILLION * hours * DOLLARS:,.2f}"]
        cells += [f"{BILLION * hours / CORES / MACHINES:.1f} h", f"${BILLION * hours * DOLLARS:,.0f}"]
        rows.append([f"`{plan}`", *cells])
    head = ["plan", "core time an image", "speed-up with reading", "lost, points"]
    head += ["million: core hours", f"on {CORES} cores", "cost", f"billion: on {MACHINES} x {CORES} cores", "cost"]
    return table(head, rows)


def assumptions() -> str:
    """What the costs are computed from."""
    reading = read("reading_time.json")
    stored, sent = 4 * WIDTH, reading["bytes"]
    photo = "JPEG of {} x {}, {:.0f} kB".format(*reading["pixels"], sent / 1000)
    rows = [
        ["encoding, full tower", f"{tower_seconds():.3f} s", f"measured: ViT-B/16, batch {BATCH}, one thread, float32"],
        ["speed-up and loss of a plan", "above", "measured: CLIP ViT-B/16, 286 photos, the same batch and thread"],
        ["reading an image", f"{1000 * reading_seconds():.1f} ms", f"measured: {photo}"],
        ["a core for an hour", f"${DOLLARS:.2f}", "assumed"],
        ["machines", f"{MACHINES} of {CORES} cores", "assumed; every core encodes its own images, and none waits"],
        ["images read, a billion", f"{BILLION * sent / 1e12:.0f} TB", "computed from the size of the JPEG"],
        ["features written, a billion", f"{BILLION * stored / 1e12:.1f} TB", f"computed: {WIDTH} numbers of 4 bytes"],
    ]
    return table(["what", "value", "where from"], rows)


if __name__ == "__main__":
    print(costs(), assumptions(), sep="\n\n")
