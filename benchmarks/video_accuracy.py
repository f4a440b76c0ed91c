"""Asks the embedded video model about test clips under plans for videos and controls, and compares them question by question.

    python benchmarks/video_accuracy.py --limit 400 --output benchmarks/results/video.json

The tower runs once for all plans, unless a plan makes frames smaller. Every batch is written down as soon as it is answered,
into a .jsonl beside the output, so that a stopped run goes on where it was; plans can be added to a finished one.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import tokensieve
from tokensieve import embedded, files, provenance
from tokensieve.cutting.passes import UnevenRow
from tokensieve.data import vqa
from tokensieve.errors import PlanWarning
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.plan import Plan
from tokensieve.tasks.vqa import answering
from tokensieve.tasks.vqa.scores import exact_match

TOKENS = 392  # of a clip: eight frames of 7 x 7
METHODS = ("cover", "evs", "vidcom2", "vcast", "fastvid", "flashvid", "holitom")
CONTROLS = ("random", "grid", "frames")
PLANS = (
    "none",
    *(f"{method}@llm.0:{budget}" for budget in (98, 49) for method in (*METHODS, *CONTROLS)),
    "llava_scissor@llm.0",  # its threshold says how many tokens are left
)


class OneTower:
    """The vision tower's forward, which runs once for the same pixels."""

    def __init__(self, tower: Any) -> None:
        self.run, self.pixels, self.output, self.is_on = tower.forward, None, None, True
        tower.forward = self

    def __call__(self, pixel_values: torch.Tensor, **more: Any) -> Any:
        if not self.is_on:
            return self.run(pixel_values, **more)
        if self.pixels is None or not torch.equal(pixel_values, self.pixels):
            self.output, self.pixels = self.run(pixel_values, **more), pixel_values.clone()
        return self.output


def main(plans: Sequence[str], split: str, limit: int, batch: int, output: Path) -> None:
    loaded = load_vlm.load(embedded.LLAVA_VIDEO)
    model, processor = loaded.model, loaded.processor
    tower = OneTower(model.model.vision_tower)
    data = vqa.load(vqa.CLIPS, split=split, limit=limit)
    records = output.with_suffix(".jsonl")
    known = _read(records, loaded.fingerprint, split)
    starts = range(0, len(data), batch)
    for start in tqdm(starts, unit="batch"):
        numbers = range(start, min(start + batch, len(data)))
        waiting = [plan for plan in plans if not set(numbers) <= set(known.get(plan, {}))]
        if not waiting:
            continue
        items = [data[number] for number in numbers]
        inputs = answering.ask(processor, items)
        for plan in waiting:
            tower.is_on = Plan.parse(plan).image_step is None
            said, tokens = _answer(model, processor, plan, inputs, torch.tensor(list(numbers)))
            right = [exact_match(text, item.answers) for text, item in zip(said, items, strict=True)]
            line = {"model": loaded.fingerprint, "split": split, "plan": plan, "numbers": list(numbers)}
            line |= {"right": right, "tokens": tokens, "kinds": [item.kind for item in items]}
            with records.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    rows = _rows(plans, _read(records, loaded.fingerprint, split), len(data))
    settings = {"model": loaded.name, "split": split, "questions": len(data), "tokens": TOKENS}
    made = {"versions": provenance.versions(), "time": time.strftime("%Y-%m-%d %H:%M:%S"), **settings, "rows": rows}
    files.write_json(output, made)
    for row in rows:
        score, lost, error = (100 * row[name] for name in ("accuracy", "lost", "se"))
        print(f"{row['plan']:40} {row['tokens']:6.1f} {score:6.1f} {lost:6.1f} ± {error:.1f}")


def _answer(model: Any, processor: Any, plan: str, inputs: Any, numbers: torch.Tensor) -> tuple[list[str], float]:
    """The answers, and the mean number of tokens of a clip behind the last cut."""
    if plan == "none":
        return answering.answer(model, processor, inputs, 4), float(TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        with tokensieve.apply(model, plan) as handle, handle.call(samples=numbers):
            said = answering.answer(model, processor, inputs, 4)
    last = handle.ledger[-1]
    return said, last.mean_out if isinstance(last, UnevenRow) else float(last.tokens_out)


def _read(path: Path, fingerprint: str, split: str) -> dict[str, dict[int, tuple[float, str, float]]]:
    """By plan and by the number of the question: whether it was right, its kind, and the tokens."""
    known: dict[str, dict[int, tuple[float, str, float]]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        line = json.loads(text)
        if line["model"] == fingerprint and line["split"] == split:
            each = zip(line["right"], line["kinds"], [line["tokens"]] * len(line["right"]), strict=True)
            known.setdefault(line["plan"], {}).update(zip(line["numbers"], each, strict=True))
    return known


def _rows(plans: Sequence[str], known: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """Accuracy of each plan, and the paired difference to the full model with its standard error."""
    full = np.array([known["none"][i][0] for i in range(n)])
    kinds = np.array([known["none"][i][1] for i in range(n)])
    rows = []
    for plan in plans:
        right = np.array([known[plan][i][0] for i in range(n)])
        lost = full - right
        by_kind = {kind: float(right[kinds == kind].mean()) for kind in dict.fromkeys(kinds.tolist())}
        rows.append(
            {
                "plan": plan,
                "tokens": float(np.mean([known[plan][i][2] for i in range(n)])),
                "accuracy": float(right.mean()),
                "stderr": math.sqrt(right.mean() * (1 - right.mean()) / n),
                "lost": float(lost.mean()),
                "se": float(lost.std(ddof=1) / math.sqrt(n)),
                "by_kind": by_kind,
            }
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--split", default="test", choices=("val", "test"))
    parser.add_argument("--limit", type=int, default=400, help="questions, each about another clip")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/video.json"))
    given = parser.parse_args()
    main(given.plans, given.split, given.limit, given.batch, given.output)
