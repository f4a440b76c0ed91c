"""How well fidelity without labels ranks plans as accuracy does, on the embedded models.

    python benchmarks/fidelity_rank.py --output benchmarks/results/fidelity_rank.json --plot docs/fidelity.png

Many different plans run on validation images. Fidelity is what `tokensieve tune` minimises: the mean of 1 - cosine to the
feature of the full model, and for the LLaVA the mean KL divergence of the next token. Accuracy is zero-shot accuracy, and for
the LLaVA the share of right answers. The result is Spearman's rank correlation over the plans, with a bootstrap interval over
plans.
"""

from __future__ import annotations

import argparse
import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from tokensieve import embedded, files, provenance
from tokensieve.device import find_device
from tokensieve.models import loading
from tokensieve.plan import Plan
from tokensieve.tasks.zeroshot_classification.classifier import zero_shot_classifier
from tokensieve.tuning.answers import NextTokens
from tokensieve.tuning.evaluator import Evaluator
from tokensieve.tuning.features import ImageFeatures
from tokensieve.tuning.images import Request

TOWER_PLANS = (
    *(f"cover@{layer}:{keep}" for layer in (2, 4, 6) for keep in (60, 32, 16, 8)),
    *(f"resize(size={size})" for size in (104, 96, 88, 80, 72, 64, 56)),
    *(
        f"resize(size={size}) + cover@{layer}:{keep}"
        for size, layer, keep in ((96, 4, 32), (96, 3, 48), (80, 5, 16), (88, 2, 32))
    ),
    *(f"{method}@4:{keep}" for method in ("random", "grid", "anchor") for keep in (98, 60, 32)),
    *(f"{method}@4:{keep}(rest=merge)" for method in ("anchor", "grid") for keep in (60, 32, 16)),
    "pool@4:49",
    "pool@4:16",
    "cover@4:16(norm=0.0)",
    "cover@*:-20",
)
VLM_PLANS = (
    *(f"cover@out:{keep}" for keep in (49, 16, 8, 4)),
    *(f"{method}@out:{keep}" for method in ("random", "grid", "anchor") for keep in (98, 49, 16)),
    *(f"{method}@out:{keep}(rest=merge)" for method in ("anchor", "grid") for keep in (49, 16)),
    *(f"{method}@llm.{layer}:16" for method in ("cover", "random") for layer in (1, 3)),
    *(f"cover@{layer}:{keep}" for layer in (2, 4) for keep in (49, 16)),
    "random@4:49",
    "pool@out:16",
    *(f"resize(size={size})" for size in (96, 80, 64)),
    "resize(size=96) + cover@out:16",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=240)
    parser.add_argument("--questions", type=int, default=96)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    results = {"sieve-vit-8": rank_tower_plans(args.images), "sieve-llava-8": rank_vlm_plans(args.questions)}
    for name, result in results.items():
        low, high = result["interval"]
        print(
            f"{name}: Spearman {result['spearman']:.3f} [{low:.3f}, {high:.3f}], {len(result['rows'])} plans, n={result['n']}"
        )
    if args.output is not None:
        files.write_json(args.output, {**results, "versions": provenance.versions()})
    if args.plot is not None:
        files.write_bytes(args.plot, draw(results))


def rank_tower_plans(images: int) -> dict[str, Any]:
    """Plans on the embedded CLIP: 1 - cosine and zero-shot accuracy."""
    subject = ImageFeatures(Request(embedded.MODEL, limit=images))
    loaded = loading.load(embedded.MODEL, embedded.PRETRAINED)
    subject.prepare(loaded)
    scenes = subject.scenes
    words = scenes.classes, scenes.templates
    head = zero_shot_classifier(loaded.model, loaded.tokenizer, *words, torch.device("cpu"), nullcontext)  # (E, C)
    labels = torch.tensor([scenes[item][1] for item in subject.images.items])
    evaluator = Evaluator(subject, find_device("cpu"), 16, 0)
    evaluator.compute_full(images)
    rows = []
    for text in tqdm(TOWER_PLANS, desc=embedded.MODEL):
        features = evaluator.outputs(evaluator.handle(Plan.parse(text)), evaluator.ranges(images))
        right = (F.normalize(features, dim=-1) @ head).argmax(-1) == labels
        distance = subject.compare(evaluator.full, features)["distance"].mean().item()
        rows.append({"plan": text, "distance": distance, "accuracy": right.double().mean().item()})
    full = ((F.normalize(evaluator.full, dim=-1) @ head).argmax(-1) == labels).double().mean().item()
    return summarise(rows, full, images, subject.distance)


def rank_vlm_plans(questions: int) -> dict[str, Any]:
    """Plans on the embedded LLaVA: KL divergence of the next token and the share of right answers."""
    subject = NextTokens(Request(embedded.LLAVA, limit=questions))
    subject.prepare(loading.load(embedded.LLAVA, "", model_type="vlm"))
    truth = [subject.scenes[item][1].answer for item in subject.images.items]
    evaluator = Evaluator(subject, find_device("cpu"), 16, 0)
    rows, full = [], torch.empty(0)
    for text in tqdm(("none", *VLM_PLANS), desc=embedded.LLAVA):
        logits, answers = answer_all(evaluator, Plan.parse(text), questions)
        full = logits if text == "none" else full
        distance = subject.compare(full, logits)["distance"].mean().item()
        right = sum(a.lower() == b.lower() for a, b in zip(answers, truth, strict=True))
        rows.append({"plan": text, "distance": distance, "accuracy": right / questions})
    return summarise(rows[1:], rows[0]["accuracy"], questions, subject.distance)


def answer_all(evaluator: Evaluator, plan: Plan, questions: int) -> tuple[torch.Tensor, list[str]]:
    """The logits of the first token of every answer (N, V), and the answers, greedily decoded."""
    model, words = evaluator.model, evaluator.subject.loaded.tokenizer
    logits, answers = [], []
    options = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    for start, stop in evaluator.ranges(questions):
        inputs = evaluator.batch(start, stop)
        handle = evaluator.handle(plan)
        with torch.inference_mode(), handle, handle.call(samples=torch.arange(start, stop)):
            made = model.generate(**inputs, **options, pad_token_id=words.pad_token_id)
        new = made.sequences[:, inputs["input_ids"].shape[1] :]
        logits.append(made.logits[0].float())
        answers += [text.strip() for text in words.batch_decode(new, skip_special_tokens=True)]
    return torch.cat(logits), answers


def summarise(rows: list[dict[str, Any]], full: float, n: int, distance: str) -> dict[str, Any]:
    """Spearman's correlation of fidelity (minus the distance) and accuracy, and its 95 % bootstrap interval over plans."""
    pairs = np.array([(-row["distance"], row["accuracy"]) for row in rows])
    rng = np.random.default_rng(0)
    draws = [spearman(pairs[rng.integers(len(pairs), size=len(pairs))]) for _ in range(2000)]
    interval = [float(value) for value in np.nanpercentile(draws, [2.5, 97.5])]
    return {
        "spearman": spearman(pairs),
        "interval": interval,
        "accuracy_full": full,
        "n": n,
        "distance": distance,
        "rows": rows,
    }


def spearman(pairs: np.ndarray) -> float:
    """Spearman's rank correlation of the two columns (P, 2), ties with their mean rank."""
    ranks = [mean_ranks(column) for column in pairs.T]
    return float(np.corrcoef(*ranks)[0, 1])


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value (P,); equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def draw(results: dict[str, dict[str, Any]]) -> bytes:
    """Accuracy over distance of every plan, one panel for each model, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colors = {
        "cover": "#2563a8",
        "resize": "#d9730d",
        "anchor": "#3f7f3f",
        "random": "#8a8f98",
        "grid": "#8a5fa8",
        "pool": "#b03a5b",
    }
    figure = Figure(figsize=(11, 4.4), dpi=120, layout="constrained")
    for axis, (name, result) in zip(figure.subplots(1, len(results)), results.items(), strict=True):
        for kind in ("resize + cover", *colors):
            rows = [row for row in result["rows"] if kind_of(row["plan"]) == kind]
            mixed = kind not in colors
            axis.plot(
                [row["distance"] for row in rows],
                [100 * row["accuracy"] for row in rows],
                "P" if mixed else "o",
                color="#14324f" if mixed else colors[kind],
                markersize=7 if mixed else 5.5,
                alpha=0.9,
                label=kind,
            )
        axis.axhline(100 * result["accuracy_full"], color="#8a8f98", linewidth=1, linestyle=(0, (4, 3)))
        axis.set_xscale("log")
        axis.set_xlabel(f"{result['distance']} to the full model, without labels")
        axis.set_ylabel("accuracy, %")
        axis.set_title(f"{name}: Spearman {result['spearman']:.2f} over {len(result['rows'])} plans", fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, color="#eceef1", linewidth=0.8)
        axis.set_axisbelow(True)
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


def kind_of(plan: str) -> str:
    """The method of a plan's last step, or that it is a mix."""
    last = plan.split(" + ")[-1].partition("@")[0].partition("(")[0]
    return f"resize + {last}" if " + " in plan else last


if __name__ == "__main__":
    main()
