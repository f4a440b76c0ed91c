"""Writes the tables of README.md and of the pages in docs/ from the result files in benchmarks/results.

    python benchmarks/tables.py

Replaces everything between <!-- table:NAME --> and <!-- /table -->.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import scale

from tokensieve.embedded import llava_path
from tokensieve.errors import UserError
from tokensieve.evaluation.results import plain_name
from tokensieve.exporting.limits import OUTSIDE, no_file_reason, no_graph_reason, no_onnx_reason
from tokensieve.leaderboard import markdown
from tokensieve.leaderboard.rows import read_folder
from tokensieve.methods.registry import list_methods
from tokensieve.plan.mixes import MIXES
from tokensieve.serving.served_plan import read_served_plan
from tokensieve.tasks.registry import is_percent

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def read(pattern: str) -> list[dict[str, Any]]:
    paths = sorted(RESULTS.glob(pattern))
    names = [plain_name(path.name) for path in paths]
    if len(set(names)) < len(names):
        sys.exit(f"several runs of {next(name for name in names if names.count(name) > 1)} in {RESULTS}: remove the older ones")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---" if i == 0 else "---:" for i in range(len(head))) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def number(metric: str, value: float) -> str:
    """A value of a metric; shares are in percent, as their tasks declare it."""
    return f"{100 * value:.1f}" if is_percent(metric, None) else f"{value:.3f}"


def unit(metric: str) -> str:
    """What follows the name of a metric in a heading."""
    return ", %" if is_percent(metric, None) else ""


def score(row: dict[str, Any], metric: str = "acc1") -> str:
    """A metric of a result with its standard error."""
    return " ± ".join(number(metric, row["metrics"][name]) for name in (metric, f"{metric}_stderr"))


def order(row: dict[str, Any]) -> tuple[int, str]:
    return (-(row["reduction"]["tokens_out"] or 0), row["reduction"]["plan"])


def embedded() -> str:
    """All plans on the embedded test set, seen and held-out pairs."""
    held = {row["reduction"]["plan"]: row for row in read("embedded-heldout_*.json")}
    rows = []
    for row in sorted(read("embedded_*.json"), key=order):
        cut = row["reduction"]
        plan = cut["plan"]
        speed = cut["images_per_second"] / cut["images_per_second_full"]
        tokens, cost = f"{cut['tokens_in']} → {cut['tokens_out']}", f"{cut['gflops']:.2f}"
        rows.append([f"`{plan}`", tokens, score(row), score(held[plan]), cost, f"{speed:.2f}x"])
    return table(
        ["plan", "patch tokens", f"acc1 seen pairs{unit('acc1')}", f"acc1 held-out pairs{unit('acc1')}", "GFLOPs", "speed-up"],
        rows,
    )


def default_job() -> str:
    """What `make eval` prints."""
    rows = []
    for row in sorted(read("default_*.json"), key=lambda row: (row["reduction"]["plan"] != "none", -row["metrics"]["acc1"])):
        cut = row["reduction"]
        speed = cut["images_per_second"] / cut["images_per_second_full"]
        tokens = f"{cut['tokens_in']} → {cut['tokens_out']}"
        rows.append([f"`{cut['plan']}`", tokens, score(row), lost(row), f"{cut['gflops']:.2f}", f"{speed:.2f}x"])
    return table(["plan", "patch tokens", f"acc1{unit('acc1')}", "lost, points", "GFLOPs", "speed-up"], rows)


def speed() -> str:
    """Realized fractions of `tokensieve bench`."""
    rows = []
    for bench in [*read("bench_ViT-*.json"), *read("bench_hf.json"), *read("bench_timm.json")]:
        for row in bench["rows"]:
            times = [f"{row[key]:.2f}x" for key in ("speedup", "speedup_oracle")]
            cost = f"{row['gflops_full']:.1f} → {row['gflops']:.1f}"
            rows.append([row["model"], str(row["batch_size"]), f"`{row['plan']}`", *times, f"{row['realized']:.3f}", cost])
    return table(["model", "batch", "plan", "speed-up", "oracle", "realized", "GFLOPs"], rows)


def throughput() -> str:
    """Evaluation throughput compared with clip_benchmark's loop."""
    (loop,), (whole,) = read("throughput_loop.json"), read("throughput_whole.json")
    rows = [
        [f"`{a['run']}`", f"{a['times_clip_benchmark']:.2f}", f"{b['times_clip_benchmark']:.2f}"]
        for a, b in zip(loop["rows"], whole["rows"], strict=True)
    ]
    head = f"{loop['model']}, batch {loop['batch_size']}, {loop['images']} images"
    return table([head, "loop / clip_benchmark's", "whole evaluation / clip_benchmark's loop"], rows)


def tasks() -> str:
    """The other tasks on the embedded data."""
    columns = {  # by the beginning of the result files: metrics with their headings
        "retrieval": {"image_retrieval_recall@1": "image recall@1", "text_retrieval_recall@1": "text recall@1"},
        "selection": {"acc": "selection acc"},
        "probe": {"lp_acc1": "linear probe acc1"},
    }
    found = {name: {row["reduction"]["plan"]: row for row in read(f"{name}_*.json")} for name in columns}
    head = ["plan", *(f"{title}{unit(metric)}" for metrics in columns.values() for metric, title in metrics.items())]
    rows = []
    for plan in sorted(found["retrieval"], key=lambda plan: (plan != "none", plan)):
        cells = [score(found[name][plan], metric) for name, metrics in columns.items() for metric in metrics]
        rows.append([f"`{plan}`", *cells])
    return table(head, rows)


def captions() -> str:
    """Captioning by the embedded CoCa."""
    metrics = ("Bleu_4", "METEOR", "ROUGE_L", "CIDEr")
    rows = []
    for row in sorted(read("captions_*.json"), key=order):
        rows.append([f"`{row['reduction']['plan']}`", *(score(row, metric) for metric in metrics)])
    return table(["plan", *(f"{metric}{unit(metric)}" for metric in metrics)], rows)


def fusion() -> str:
    """Token fusion."""
    rows = []
    for kind in ("cls", "weighted", "mean"):
        (pruned,), (selected,) = read(f"fusion_pruning_{kind}.json"), read(f"fusion_selection_{kind}.json")
        rows.append([f"`{kind}`", score(pruned), score(selected)])
    (pruned,), (selected,) = read("fusion_pruning_cls.json"), read("fusion_selection_cls.json")
    plans = [row["reduction"]["plan"] for row in (pruned, selected)]
    return table(["token_fusion", *(f"acc1{unit('acc1')}: `{plan}`" for plan in plans)], rows)


def _stages(cut: dict[str, Any]) -> str:
    return " → ".join(str(n) for n in [cut["tokens_in"], *(row["tokens_out"] for row in cut["layers"])])


def _questions() -> list[tuple[str, dict[str, Any]]]:
    """Result rows for the test questions with a title each, the full model first."""
    found = {row["reduction"]["plan"]: row for row in read("vlm_*.json")}
    full = found.pop("none")
    named = [("full model", full)]
    named += [("merger and pruners, trained", row) for plan, row in found.items() if plan.startswith("merger")]
    for plan, row in sorted(found.items()):
        if not plan.startswith("merger"):
            merged = ", rest merged" if "rest=merge" in plan else ""
            named.append((f"`{plan.split('@')[0]}`{merged}", row))
    return named


def vlm() -> str:
    """Two-stage VLM pruning, and controls at the same token counts."""
    return _answers(_questions())


def vlm_short() -> str:
    """A short version for README: full model, two-stage VLM pruning, controls."""
    wanted = ("full model", "merger and", "`random`", "`grid`")
    return _answers([(name, row) for name, row in _questions() if name.startswith(wanted)])


def _answers(named: list[tuple[str, dict[str, Any]]]) -> str:
    base = named[0][1]["metrics"]["vqa_score"]
    rows = []
    for name, row in named:
        cut, score = row["reduction"], row["metrics"]["vqa_score"]
        lost = f"{base - score:+.3f}" if row is not named[0][1] else ""
        cost = f"{cut['gflops_llm']:.2f}"
        rows.append([name, _stages(cut), f"{score:.3f} ± {row['metrics']['vqa_score_stderr']:.3f}", lost, cost])
    return table(["", "vision tokens", "accuracy", "drop", "LLM GFLOPs"], rows)


def vlm_trained() -> str:
    """Trained parts and controls at several budgets, with the differences of the answers to the same questions."""
    (found,) = read("trained_vlm.json")
    gaps = {(row["title"], row["control"]): row for row in found["compared"]}
    by_title: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        by_title.setdefault((row["budget"], row["title"]), []).append(row)
    rows = []
    for (budget, title), runs in by_title.items():
        accuracy = statistics.mean(run["accuracy"] for run in runs)
        error = f" ± {runs[0]['stderr']:.3f}" if len(runs) == 1 else ""
        each = ", ".join(f"{run['accuracy']:.3f}" for run in runs) if len(runs) > 1 else ""
        controls = ("untrained merger, random pruning, rest merged", "`cover`", "full model")
        compared = [gaps.get((title, control)) for control in controls]
        rows.append(
            [budget or "none", title, f"{accuracy:.3f}{error}", each]
            + [f"{gap['difference']:+.3f} ± {gap['stderr']:.3f}" if gap else "" for gap in compared]
        )
    head = ["budget", "parts", "accuracy", "seeds", "against untrained + random", "against `cover`", "against the full model"]
    return table(head, rows)


def vlm_time() -> str:
    """Time per phase, full model and plan, batch sizes 1 and 16."""
    rows = []
    (bench,) = read("time_vlm.json")
    for row in bench["rows"]:
        for phase in ("tower", "selection", "prefill", "prefill_with_selection", "decode", "total"):
            seconds = [1000 * row["seconds_full"][phase], 1000 * row["seconds"][phase]]
            faster = row["speedup"].get(phase)
            times = [f"{value:.1f}" for value in seconds]
            rows.append([f"batch {row['batch_size']}, {phase.replace('_', ' ')}", *times, f"{faster:.2f}x" if faster else ""])
    return table(["ms", "full", "plan", "speed-up"], rows)


REID = {
    "baseline": "all tokens",
    "sdtps": "SDTPS",
    "gumbel": "SDTPS, Gumbel",
    "random": "`random`",
    "grid": "`grid`",
    "anchor": "`anchor`",
    "sdtps-half": "SDTPS after block 3 of 6",
    "random-half": "`random` after block 3 of 6",
    "grid-half": "`grid` after block 3 of 6",
}


def _over_seeds(rows: list[dict[str, Any]], metric: str) -> str:
    """Mean and standard error over trainings."""
    values = [row["metrics"][metric] for row in rows]
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{number(metric, statistics.mean(values))} ± {number(metric, error)}"


def reid() -> str:
    """Trainings of the embedded re-identification, three seeds each."""
    rows = []
    for name, title in REID.items():
        found = read(f"reid_{name}-[0-9].json")
        cut = found[0]["reduction"]
        cells = [_over_seeds(found, metric) for metric in ("mAP", "rank_1", "mAP_tokens", "mAP_plain")]
        rows.append([title, f"{cut['tokens_in']} → {cut['tokens_out']}", *cells, f"{cut['gflops']:.2f}"])
    return table(
        ["", "patches", f"mAP{unit('mAP')}", f"rank-1{unit('rank_1')}", "mAP, tokens alone", "mAP, plain alone", "GFLOPs"], rows
    )


def reid_short() -> str:
    """A short version for README."""
    wanted = ("baseline", "sdtps", "random", "sdtps-half", "random-half")
    rows = []
    for name in wanted:
        found = read(f"reid_{name}-[0-9].json")
        cut = found[0]["reduction"]
        cells = [_over_seeds(found, metric) for metric in ("mAP", "rank_1")]
        rows.append([REID[name], f"{cut['tokens_in']} → {cut['tokens_out']}", *cells, f"{cut['gflops']:.2f}"])
    return table(["", "patches", f"mAP{unit('mAP')}", f"rank-1{unit('rank_1')}", "GFLOPs"], rows)


REID_MERGE = {  # files: what was run
    "baseline": "all tokens",
    "baseline-more": "all tokens, one epoch more",
    "cover-half-untrained": "`cover@3:26`, untrained",
    "sdtps-half-merge": "`sdtps@3(aggregation=merge,norm=2)`",
    "sdtps-half-norm0-merge": "`sdtps@3(aggregation=merge)`",
    "cover-half": "`cover@3:26`",
    "grid-half-merge": "`grid@3:26(rest=merge,norm=2)`",
    "random-half-merge": "`random@3:26(rest=merge,norm=2)`",
    "cover-third-untrained": "`cover@2:40`, untrained",
    "sdtps-third-merge": "`sdtps@2(aggregation=merge,norm=2)`",
    "cover-third": "`cover@2:40`",
    "grid-third-merge": "`grid@2:40(rest=merge,norm=2)`",
    "random-third-merge": "`random@2:40(rest=merge,norm=2)`",
}


def reid_merge() -> str:
    """Merges inside the re-identification backbone, by seed."""
    rows = []
    for name, title in REID_MERGE.items():
        found = {seed: row for seed in "123" for row in read(f"reid-merge_{name}-{seed}.json")}
        cut = next(iter(found.values()))["reduction"]
        by_seed = [number("mAP", found[seed]["metrics"]["mAP"]) if seed in found else "" for seed in "123"]
        saved = 1 - cut["gflops"] / cut["gflops_full"]
        cells = [f"{cut['tokens_in']} → {cut['tokens_out']}", *by_seed, f"{cut['gflops']:.2f}", f"{100 * saved:.0f}%"]
        rows.append([title, *cells])
    return table(["", "patches", *(f"mAP{unit('mAP')}, seed {seed}" for seed in "123"), "GFLOPs", "saved"], rows)


def reid_modalities() -> str:
    """The embedded model with every combination of modalities."""
    found = {row["reduction"]["plan"]: row for row in read("reid-modalities_*.json")}
    plans = sorted(found, key=lambda plan: (not plan.startswith("sdtps"), plan != "none", plan))
    rows = []
    for some in found[plans[0]]["run"]["modalities"]:
        name = some.replace(",", "+")
        numbers = [(found[plan]["metrics"][f"mAP_{name}"], found[plan]["metrics"][f"rank_1_{name}"]) for plan in plans]
        rows.append([name, *(f"{number('mAP', ap)} / {number('rank_1', first)}" for ap, first in numbers)])
    return table([f"mAP / rank-1{unit('mAP')}", *(f"`{plan}`" for plan in plans)], rows)


def reid_time() -> str:
    """GFLOPs and time, in total and after the cut."""
    rows = []
    (bench,) = read("time_reid.json")
    for row in bench["rows"]:
        full, cut = row["full"], row["reduced"]
        cost = [f"{full[key]:.2f} → {cut[key]:.2f}" for key in ("gflops", "gflops_after")]
        rows.append([f"{row['model']}, `{row['plan']}`", *cost, f"{row['speed_up']:.2f}x", f"{row['speed_up_after']:.2f}x"])
    return table(["", "GFLOPs", "after the cut", "speed-up", "after the cut"], rows)


def points(value: float, error: float) -> str:
    """Lost accuracy in percentage points with its standard error."""
    return f"{100 * value:.1f} ± {100 * error:.1f}"


def lost(row: dict[str, Any]) -> str:
    """What a plan loses of the main metric against the full model in the same run."""
    cut = row["reduction"]
    return points(cut["lost"], cut["lost_stderr"]) if "lost" in cut else ""


def _equal_time(file: str) -> str:
    (found,) = read(file)
    rows = []
    for row in sorted(found["rows"], key=lambda row: row["speedup"]):
        distance = f"{1000 * row['distance']:.0f} ± {1000 * row['distance_stderr']:.0f}"
        is_full = row["plan"] == "none"
        cells = ["", ""] if is_full else [points(row["lost"], row["lost_stderr"]), distance]
        rows.append([f"`{row['plan']}`", f"{row['speedup']:.2f}x", f"{100 * row['acc1']:.1f}", *cells, f"{row['gflops']:.2f}"])
    return table(["plan", "measured speed-up", "acc1, %", "lost, points", "1 - cos, x 1000", "GFLOPs"], rows)


def equal_time_clip() -> str:
    """Plans at measured time on a real CLIP."""
    return _equal_time("equal_time_clip.json")


def equal_time_embedded() -> str:
    """Plans at measured time on the embedded classifier."""
    return _equal_time("equal_time_embedded.json")


FIRST = {  # README's first table: result files, their heading, their metric, and the plans to show
    "equal_time_clip.json": (
        "CLIP ViT-B/16, 286 photos, top-1",
        ("none", "2x", "resize(size=160)", "tome:-16", "cover:32", "anchor(k=10,m=50,alpha=0.5)"),
    ),
    "equal_time_embedded.json": (
        "embedded CLIP, 2,000 images, top-1",
        ("none", "cover@2:56", "cover:32", "resize(size=80)", "tome:-20", "anchor(k=10,m=50,alpha=0.5)", "random@2:56"),
    ),
}
FIRST_EVALS = {
    "cover-vqa_*.json": (
        "embedded LLaVA, 600 questions, accuracy",
        "vqa_score",
        ("none", "cover@out:40", "cover@out:16", "grid@out:16(rest=merge)"),
    ),
    "cover-reid_*.json": (
        "embedded re-identification, mAP",
        "mAP",
        ("none", "cover@3:26", "grid@3:26(rest=merge)", "resize(scale=0.75)"),
    ),
}


def first() -> str:
    """README's first table: what plans lose at what speed."""
    rows: list[list[str]] = []
    for file, (title, plans) in FIRST.items():
        (found,) = read(file)
        for row in sorted(found["rows"], key=lambda row: (row["plan"] != "none", -row["acc1"])):
            if row["plan"] in plans:
                cells = ["" if row["plan"] == "none" else points(row["lost"], row["lost_stderr"]), f"{row['speedup']:.2f}x"]
                rows.append([title, f"`{row['plan']}`", f"{100 * row['acc1']:.1f}", *cells])
    for pattern, (title, metric, plans) in FIRST_EVALS.items():
        shown = [row for row in read(pattern) if row["reduction"]["plan"] in plans]
        full = next(row["metrics"][metric] for row in shown if row["reduction"]["plan"] == "none")
        for row in sorted(shown, key=lambda row: (row["reduction"]["plan"] != "none", -row["metrics"][metric])):
            cut = row["reduction"]
            difference = "" if cut["plan"] == "none" else f"{100 * (full - row['metrics'][metric]):.1f}"
            speed = cut["images_per_second"] / cut["images_per_second_full"]
            rows.append(
                [title, f"`{cut['plan']}`", f"{100 * row['metrics'][metric]:.1f}", lost(row) or difference, f"{speed:.2f}x"]
            )
    named: set[str] = set()
    for row in rows:  # the model stands in its first row
        row[0], _ = ("" if row[0] in named else row[0]), named.add(row[0])
    return table(["model, data, score", "plan", "score, %", "lost, points", "speed-up"], rows)


VIDEO_SHORT = ("none", "flashvid@llm.0:98", "cover@llm.0:98", "frames@llm.0:98", "random@llm.0:98")


def _video(plans: Sequence[str]) -> list[dict[str, Any]]:
    """Plans on clips, those that leave most tokens first, then by what they lose. plans: those to show; none: all."""
    (found,) = read("video.json")
    shown = [row for row in found["rows"] if not plans or row["plan"] in plans]
    return sorted(shown, key=lambda row: (-round(row["tokens"], -1), row["lost"]))


def _video_cells(row: dict[str, Any]) -> list[str]:
    difference = "" if row["plan"] == "none" else points(row["lost"], row["se"])
    return [f"`{row['plan']}`", f"{row['tokens']:.0f}", f"{100 * row['accuracy']:.1f}", difference]


VIDEO_HEADS = ["plan", "tokens of a clip", "answers right, %", "lost, points"]


def video() -> str:
    """Plans for videos and controls, with every kind of question."""
    rows = _video(())
    cells = [[*_video_cells(row), *(f"{100 * value:.0f}" for value in row["by_kind"].values())] for row in rows]
    return table([*VIDEO_HEADS, *rows[0]["by_kind"]], cells)


def video_short() -> str:
    """A few of them for README, with the speed-up of long videos at a quarter of the tokens, and the share of the oracle's."""
    (found,) = read("video_speed.json")
    speed = {(row["plan"], row["tokens_in"]): f"{row['speedup']:.1f}x, {row['realised']:.2f}" for row in found["rows"]}
    lengths = sorted({tokens for _, tokens in speed})
    cells = []
    for row in _video(VIDEO_SHORT):
        timed = f"{row['plan'].split('@')[0]}:25%"
        cells.append([*_video_cells(row), *(speed.get((timed, length), "") for length in lengths)])
    return table([*VIDEO_HEADS, *(f"prefill, {length:,} tokens" for length in lengths)], cells)


SEEDS = {
    "far": "farthest points (`cover`)",
    "anchor": "CLS attention",
    "peaks": "density peaks",
    "grid": "grid",
    "random": "random",
}


def _ablation(file: str, value: Callable[[dict[str, Any]], str]) -> str:
    (found,) = read(file)
    cells = {(row["seeds"], row["rest"], row["norm"], row["keep"]): value(row) for row in found["rows"]}
    keeps = sorted({row["keep"] for row in found["rows"]}, reverse=True)
    kinds = dict.fromkeys((row["seeds"], row["rest"], row["norm"]) for row in found["rows"])
    order_of = list(SEEDS)
    rows = []
    for seeds, rest, norm in sorted(kinds, key=lambda kind: (order_of.index(kind[0]), kind[1], kind[2] or 0)):
        what = rest if norm is None else f"{rest}, norm={norm:g}"
        rows.append([f"{SEEDS[seeds]}, {what}", *(cells[seeds, rest, norm, keep] for keep in keeps)])
    return table([f"{found['images']} images, after block {found['place']}", *(f"K = {keep}" for keep in keeps)], rows)


def _lost_points(row: dict[str, Any]) -> str:
    return points(row["lost"], row["lost_stderr"])


def _distance(row: dict[str, Any]) -> str:
    return f"{1000 * row['distance']:.0f}"


def ablation_val() -> str:
    """Lost accuracy, embedded validation images."""
    return _ablation("ablation_val.json", _lost_points)


def ablation_test() -> str:
    """Lost accuracy, embedded test images."""
    return _ablation("ablation_test.json", _lost_points)


def antialias() -> str:
    """Smaller images with and without a filter."""
    (found,) = read("antialias_clip.json")
    cells = {row["plan"]: f"{1000 * row['distance']:.0f} ± {1000 * row['distance_stderr']:.0f}" for row in found["rows"]}
    differences = {tuple(pair["plans"]): pair["distance"] for pair in found["versus"]}
    rows = []
    for size in (192, 160, 144, 128):
        plans = (f"resize(size={size})", f"resize(size={size},antialias=yes)")
        mean, error = differences[plans]
        rows.append([f"{size} pixels", *(cells[plan] for plan in plans), f"{1000 * mean:.1f} ± {1000 * error:.1f}"])
    head = f"1 - cos, x 1000, {found['images']} photos"
    return table([head, "`antialias=no`", "`antialias=yes`", "difference, paired"], rows)


def mixes() -> str:
    """The named mixes on the embedded LLaVA and re-identification models."""
    rows = []
    for pattern, title, metric in (
        ("mixes-vqa_*.json", "embedded LLaVA, 600 questions, accuracy", "vqa_score"),
        ("mixes-reid_*.json", "embedded re-identification, mAP", "mAP"),
    ):
        found = sorted(read(pattern), key=lambda row: (row["reduction"]["plan"] != "none", -row["metrics"][metric]))
        for row in found:
            cut = row["reduction"]
            speed = cut["images_per_second"] / cut["images_per_second_full"]
            value = f"{100 * row['metrics'][metric]:.1f} ± {100 * row['metrics'][f'{metric}_stderr']:.1f}"
            name = next((mix for mix, plan in MIXES.items() if plan == cut["plan"]), "")
            shown = f"`{name}`: `{cut['plan']}`" if name else f"`{cut['plan']}`"
            rows.append([title if row is found[0] else "", shown, value, lost(row), f"{speed:.2f}x"])
    return table(["model, data, score", "plan", "score, %", "lost, points", "speed-up"], rows)


def ablation_early() -> str:
    """Lost accuracy, a cut after block 2 of 8."""
    return _ablation("ablation_place2.json", _lost_points)


def ablation_late() -> str:
    """Lost accuracy, a cut after block 6 of 8."""
    return _ablation("ablation_place6.json", _lost_points)


def ablation_clip() -> str:
    """Lost accuracy and distance, real CLIP."""
    return _ablation("ablation_clip.json", lambda row: f"{_lost_points(row)} / {_distance(row)}")


def _losses(pattern: str, metric: str) -> str:
    found = sorted(read(pattern), key=lambda row: (row["reduction"]["plan"] != "none", -row["metrics"][metric]))
    rows = []
    for row in found:
        cut = row["reduction"]
        difference = lost(row) or (
            "" if row is found[0] else f"{100 * (found[0]['metrics'][metric] - row['metrics'][metric]):.1f}"
        )
        rows.append([f"`{cut['plan']}`", f"{cut['tokens_in']} → {cut['tokens_out']}", score(row, metric), difference])
    return table(["plan", "tokens", f"{metric}{unit(metric)}", "lost, points"], rows)


def cover_vqa() -> str:
    """Questions to the embedded LLaVA."""
    return _losses("cover-vqa_*.json", "vqa_score")


def cover_reid() -> str:
    """The embedded re-identification model."""
    return _losses("cover-reid_*.json", "mAP")


def _task_ablation(columns: dict[tuple[str, str], str]) -> str:
    """columns: result file and place of the cut: heading."""
    found = {file: read(f"ablation_{file}.json")[0] for file in dict.fromkeys(file for file, _ in columns)}
    head, lines = ["lost"], {}
    for (file, place), title in columns.items():
        of = found[file]
        percent = is_percent(of["metric"], of["task"])
        for keep in sorted({row["keep"] for row in of["rows"]}, reverse=True):
            head.append(f"{title} ({number(of['metric'], of['full'])}), K = {keep}")
            for row in (row for row in of["rows"] if (row["place"], row["keep"]) == (place, keep)):
                what = row["rest"] if row["norm"] is None else f"{row['rest']}, norm={row['norm']:g}"
                cell = _lost_points(row) if percent else f"{row['lost']:.2f} ± {row['lost_stderr']:.2f}"
                lines.setdefault(f"{SEEDS[row['seeds']]}, {what}", []).append(cell)
    return table(head, [[name, *cells] for name, cells in lines.items()])


def ablation_tasks() -> str:
    """What variants lose on the other tasks of the embedded CLIP and CoCa."""
    return _task_ablation(
        {
            ("heldout", "4"): "held-out pairs",
            ("retrieval", "4"): "recall@5",
            ("probe", "4"): "linear probe",
            ("captions", "4"): "CIDEr",
        }
    )


def ablation_vqa() -> str:
    """What variants lose in the embedded LLaVA, by place."""
    return _task_ablation({("vqa", place): f"`@{place}`" for place in ("out", "llm.0", "llm.3")})


def ablation_reid() -> str:
    """What variants lose inside the embedded re-identification backbone."""
    return _task_ablation({("reid", "3"): "mAP"})


def attack() -> str:
    """Tries and failures of `make attack`, over all runs."""
    runs = read("attack_*.json")
    rows = []
    for name in dict.fromkeys(row["class"] for run in runs for row in run["classes"]):
        found = [row for run in runs for row in run["classes"] if row["class"] == name]
        rows.append([name, found[0]["summary"], *(f"{sum(row[key] for row in found):,}" for key in ("tries", "failures"))])
    total = [f"{sum(row[key] for run in runs for row in run['classes']):,}" for key in ("tries", "failures")]
    rows.append(["all", f"seeds {', '.join(str(run['seed']) for run in runs)}", *total])
    return table(["class", "what is tried", "tries", "failures"], rows)


def _suite() -> dict[str, Any]:
    found = read("bench_suite.json")
    if not found:
        sys.exit("there is no bench_suite.json: run tokensieve bench --suite --output benchmarks/results/bench_suite.json")
    return found[0]


def _phase(row: dict[str, Any]) -> str | None:
    """What is compared of a row of the suite: a cut in the decoder leaves the tower as it is."""
    if row["kind"] == "tower":
        return None
    return "prompt" if row["case"].startswith("llm") else "first"


def _ratio(row: dict[str, Any], name: str, phase: str | None) -> list[float]:
    """A ratio of a row with its quartiles."""
    return [row[f"{name}{end}"] if phase is None else row[f"{name}{end}"][phase] for end in ("", "_low", "_high")]


def suite() -> str:
    """Speed-up and realized fraction of every plan of the suite, by batch size."""
    found = _suite()["rows"]
    sizes = sorted({row["batch_size"] for row in found})
    rows = []
    for model, plan in dict.fromkeys((row["model"], row["plan"]) for row in found):
        chosen = {row["batch_size"]: row for row in found if (row["model"], row["plan"]) == (model, plan)}
        cells = []
        for size in sizes:
            row = chosen[size]
            faster, reached = (_ratio(row, name, _phase(row)) for name in ("speedup", "realized"))
            cells.append(f"{faster[0]:.2f}x, {reached[0]:.3f} ({reached[1]:.3f}-{reached[2]:.3f})")
        last = chosen[sizes[-1]]
        decode = " / ".join(f"{chosen[size]['realized']['decode']:.2f}" for size in sizes) if last["kind"] == "vlm" else ""
        peak = f"{last['peak_mib_full']:.0f} → {last['peak_mib']:.0f}"
        rows.append([model if all(model != row[0] for row in rows) else "", f"`{plan}`", *cells, decode, peak])
    batches = [f"batch {size}: speed-up, realized" for size in sizes]
    return table(["model", "plan", *batches, "decode steps", f"peak MiB, batch {sizes[-1]}"], rows)


GOALS = (  # what, before, goal, least, kind, cases, phase, batch sizes
    ("towers, one cut, drop or merge", "0.95 - 1.02", 0.98, "tower", ("one cut, drop", "one cut, merge"), None, (1, 4, 16)),
    ("towers, `pool@*.attn:-8` (12 cuts)", "0.92 - 1.00", 0.97, "tower", ("12 cuts",), None, (1, 4, 16)),
    ("decoder, choice without attention, `@llm.2`", "0.90 - 0.97", 0.98, "vlm", ("llm, no attention",), "prompt", (1, 4)),
    ("decoder, `anchor@llm.2:64`", "0.83 - 0.88", 0.92, "vlm", ("llm, own attention",), "prompt", (1, 4, 16)),
    ("the same, `attention=previous`", "", 0.95, "vlm", ("llm, previous attention",), "prompt", (1, 4, 16)),
    (
        "decode step, plans in the decoder",
        "0.94 - 0.98",
        0.99,
        "vlm",
        ("llm, no attention", "llm, own attention"),
        "decode",
        (1, 4, 16),
    ),
    ("embedded two-stage plan, batch 1, to the first logits", "0.75", 0.85, "vlm", ("two stages",), "first", (1,)),
)


def goals() -> str:
    """Goals for the realized fraction, and what is reached."""
    found = _suite()
    rows = []
    for title, before, least, kind, cases, phase, sizes in GOALS:
        wanted = [row for row in found["rows"] if row["kind"] == kind and row["case"] in cases and row["batch_size"] in sizes]
        values = [_ratio(row, "realized", phase)[0] for row in wanted]
        worst = wanted[values.index(min(values))]
        lowest = f"{worst['model']}, `{worst['plan']}`, batch {worst['batch_size']}"
        measured = f"{min(values):.3f} - {max(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"
        reached = f"{sum(value >= least for value in values)} of {len(values)}"
        rows.append([title, before, f"at least {least:.2f}", measured, reached, lowest])
    two = next(row for row in found["rows"] if row["case"] == "two stages" and row["batch_size"] == 1)
    faster = _ratio(two, "speedup", "first")
    shown = f"{faster[0]:.2f}x ({faster[1]:.2f}-{faster[2]:.2f})"
    rows.append(
        ["the same, against the full model", "0.69x", "at least 1.00x", shown, f"{int(faster[0] >= 1)} of 1", two["model"]]
    )
    memory = found["memory"]
    for plan in dict.fromkeys(row["plan"] for row in memory):
        chosen = [row for row in memory if row["plan"] == plan]
        growth = (chosen[-1]["peak_mib"] / chosen[0]["peak_mib"]) / (chosen[-1]["vision_tokens"] / chosen[0]["vision_tokens"])
        below = sum(row["peak_mib"] < row["peak_mib_full"] for row in chosen)
        sizes_shown = ", ".join(
            f"{row['vision_tokens']:,}: {row['peak_mib_full']:.0f} → {row['peak_mib']:.0f}" for row in chosen
        )
        goal = "linear in N, below the full model's"
        rows.append(
            [f"peak MiB over N, `{plan}`", "K x N", goal, sizes_shown, f"{below} of {len(chosen)}", f"{growth:.2f} times N"]
        )
    return table(["case", "before", "goal", "measured", "rows that reach it", "lowest, or growth"], rows)


def leaderboard() -> str:
    """Every board: a line for each method and place."""
    return markdown.tables(read_folder(RESULTS / "leaderboard")[0])


def leaderboard_summary() -> str:
    """What wins on each board."""
    return markdown.summary(read_folder(RESULTS / "leaderboard")[0])


def leaderboard_overview() -> str:
    """Every method on every board with 30 % of the tokens."""
    return markdown.overview(read_folder(RESULTS / "leaderboard")[0], 0.3)


def leaderboard_skipped() -> str:
    """What models cannot carry out."""
    return markdown.skipped_table(read_folder(RESULTS / "leaderboard")[1])


def zoo() -> str:
    """What deciding costs, the dearest first."""
    (found,) = read("zoo.json")
    rows = sorted(found["rows"], key=lambda row: -max(row.get("of_block", 0.0), row.get("of_layer", 0.0)))
    cells = []
    for row in rows:
        of_block, of_layer = (f"{row[f'of_{what}']:.1%}" if f"of_{what}" in row else "" for what in ("block", "layer"))
        keeps = (str(row[f"keep_{what}"]) if f"of_{what}" in row else "" for what in ("block", "layer"))
        keep_block, keep_layer = keeps
        reached = f"{row['realized']:.2f}" if "realized" in row else ""
        cells.append([f"`{row['method']}`", keep_block, of_block, keep_layer, of_layer, reached])
    head = ["method", "of 196 patches", "share of a ViT-B/16 block", "of 576 tokens", "share of a 7B layer", "realized"]
    return table(head, cells)


def trained_zoo() -> str:
    """Trained parts beside untrained ones and controls, and what each loses against the full model."""
    ordered = sorted(read("trained_zoo_val.json")[0]["rows"], key=lambda row: -row["acc1"])
    rows = []
    for row in ordered:
        part = {"none": "full model"}.get(row["plan"], "trained" if row["trained"] else "")
        if not row["trained"] and any(other["trained"] and other["plan"] == row["plan"] for other in ordered):
            part = "untrained"
        loss = "" if row["plan"] == "none" else f"{100 * row['lost']:.1f} ± {100 * row['lost_stderr']:.1f}"
        rows.append([f"`{row['plan']}`", part, f"{100 * row['acc1']:.1f}", loss])
    return table(["plan", "its part", "top-1, %", "lost, points"], rows)


def compiled() -> str:
    """Does torch.compile pay for a tower with a plan."""
    (found,) = read("compile_time.json")
    rows = []
    for row in found["rows"]:
        faster = f"{row['speedup']:.2f}x ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
        graphs, difference = str(row["graphs"]), f"{row['largest_difference']:.0e}"
        compiling = f"{row['compile_seconds']:.0f} s"
        rows.append([str(row["batch_size"]), f"`{row['plan']}`", faster, compiling, graphs, difference])
    return table(["batch", "plan", "compiled against eager", "compiling takes", "graphs", "largest difference"], rows)


def onnx_speed() -> str:
    """Exported towers with a plan in ONNX Runtime."""
    rows = []
    for row in (row for found in read("onnx_speed.json") for row in found["rows"]):
        faster = f"{row['speedup']:.2f}x ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
        times = [f"{1000 * row[name]:.0f} ms" for name in ("seconds_full", "seconds")]
        rows.append([str(row["batch_size"]), f"`{row['plan']}`", *times, faster, f"{row['difference']:.0e}"])
    return table(["batch", "plan", "full tower", "with the plan", "speed-up", "difference from the model"], rows)


def export_limits() -> str:
    """Methods that cannot be part of a graph or a file, and why."""
    rows = []
    for method in list_methods():
        reasons = [reason(method) for reason in (no_graph_reason, no_file_reason, no_onnx_reason)]
        if reasons[-1]:
            rows.append([f"`{method.name}`", *("no" if reason else "yes" for reason in reasons), reasons[-1]])
    return table(["method", "one graph", ".pt2", ".onnx", "why not"], rows)


def serving_methods() -> str:
    """Methods that vLLM can carry out, by where."""
    llava = json.loads((llava_path() / "config.json").read_text(encoding="utf-8"))
    qwen = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}

    def names(config: dict[str, Any], place: str) -> list[str]:
        found = []
        for method in list_methods():
            with contextlib.suppress(UserError):
                if not method.on_image and read_served_plan(config | {"tokensieve_plan": f"{method.name}@{place}:60"}):
                    found.append(method.name)
        return found

    everywhere = names(qwen, "llm.0")
    with_attention = [name for name in names(llava, "out") if name not in everywhere]
    rows = [["without attention", everywhere], ["with attention", with_attention]]
    return table(["methods", "names"], [[kind, ", ".join(f"`{name}`" for name in found)] for kind, found in rows])


def export_matrix() -> str:
    """Of the methods that say they can be in a graph: how many are, by family and engine."""
    rows = []
    for found in read("export_matrix_*.json"):
        cells = [found["family"]]
        for engine, reason in (("compile", no_graph_reason), ("export", no_file_reason), ("onnx", no_onnx_reason)):
            done = [row for row in found["rows"] if row["engine"] == engine]
            on_tokens = [method for method in list_methods() if not method.on_image and method.name != "none"]
            able = {each.name for each in on_tokens if not reason(each) and not OUTSIDE.keys() & set(each.needs)}
            tried = {name for row in done for name in row["methods"]} & able
            good = [row for row in done if not row["error"]]
            works = {name for row in good for name in row["methods"]}
            missing = "".join(f", not `{name}`" for name in sorted(tried - works))
            untried = f" ({len(able - tried)} not tried)" if able - tried else ""
            cells.append(f"{len(works)} of {len(able)}{missing}{untried}" if tried else "not tried")
            cells.append(f"{max(row['difference'] for row in good):.0e}" if good else "")
        rows.append(cells)
    heads = [[engine, "largest difference"] for engine in ("torch.compile", "torch.export", "ONNX Runtime")]
    return table(["tower", *(head for pair in heads for head in pair)], rows)


def video_speed() -> str:
    """Prefill of videos under plans, against the stock model on as few tokens."""
    (found,) = read("video_speed.json")
    by_plan: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        by_plan.setdefault(row["plan"], []).append(row)
    rows = []
    for plan, lengths in by_plan.items():
        cells = [[str(row["tokens_out"]), f"{row['realised']:.2f}", f"{row['speedup']:.1f}x"] for row in lengths]
        rows.append([f"`{plan}`", *(cell for length in cells for cell in length)])
    counts = [f"{row['tokens_in']:,}" for row in next(iter(by_plan.values()))]
    heads = [[f"left of {count}", "of the oracle's speed", "speed-up"] for count in counts]
    return table(["plan at `@llm.0`", *(head for length in heads for head in length)], rows)


def family_speed() -> str:
    """Prefill and decode steps of every family under plans, beside their oracles."""
    by_model: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for found in read("family_speed_*.json"):
        for row in found["rows"]:
            by_model.setdefault((row["model"], row["plan"]), {})[row["vision_tokens"]] = row
    columns = sorted({_near(tokens) for rows in by_model.values() for tokens in rows})
    lines, model = [], ""
    for (name, plan), rows in sorted(by_model.items(), key=lambda item: item[0][0].lower()):
        cells = {_near(tokens): _realised(row) for tokens, row in rows.items()}
        lines.append([name if name != model else "", f"`{plan}`", *(cells.get(column, "") for column in columns)])
        model = name
    return table(["family", "plan", *(f"{column:,} tokens" for column in columns)], lines)


FAMILY_TOKENS = (576, 2304, 9216, 15876)  # what was asked for; families with tiles have somewhat fewer or more


def _near(tokens: int) -> int:
    return min(FAMILY_TOKENS, key=lambda asked: abs(asked - tokens))


def _realised(row: dict[str, Any]) -> str:
    """Of the first logits and of a decode step, and the speed-up."""
    return f"{row['realized']['first']:.2f}, {row['realized']['decode']:.2f}, {row['speedup']['first']:.1f}x"


def video_cover() -> str:
    """What choosing seeds costs, by the tokens of a video."""
    (found,) = read("video_speed.json")
    ways = {"blocks": "`cover`", "at_once": "all seeds at once"}
    counts = list(found["cover"]["blocks"])
    rows = []
    for name, title in ways.items():
        seconds = [found["cover"][name][count] for count in counts]
        rows.append([title, *(f"{value / seconds[0]:.1f}" for value in seconds)])
    return table(["time, that of the shortest video is 1", *(f"{int(count):,} tokens" for count in counts)], rows)


SERVED = {  # what is measured: heading, and how the values without a plan are written
    "requests_per_second": ("requests/s", lambda value: f"{value:.3g}"),
    "first_token_seconds": ("first token", lambda value: f"{value:.2f} s"),
}


def _serving(file: str) -> str:
    """Requests in vLLM: medians without a plan, and under plans their ratios to the same round without one."""
    (found,) = read(file)
    cells = {(row["plan"], row["at_a_time"], row["round"]): row for row in found["rows"]}
    plans, loads = (list(dict.fromkeys(key[part] for key in cells)) for part in range(2))

    def rounds(load: int) -> list[int]:
        return [turn for plan, at_a_time, turn in cells if (plan, at_a_time) == ("none", load)]

    def cell(plan: str, load: int, name: str) -> str:
        if plan == "none":
            return SERVED[name][1](statistics.median(cells[plan, load, turn][name] for turn in rounds(load)))
        ratios = [cells[plan, load, turn][name] / cells["none", load, turn][name] for turn in rounds(load)]
        return f"{statistics.median(ratios):.2f}x"

    def of_plan(plan: str, name: str) -> float:
        return statistics.median(cells[plan, 1, turn][name] for turn in rounds(1))

    rows = []
    for plan in plans:
        fits = of_plan("none", "kv_places") / of_plan(plan, "kv_places")
        row = [f"`{plan}`", f"{of_plan(plan, 'prompt_tokens'):.0f}", f"{of_plan(plan, 'kv_places'):.0f}", f"{fits:.1f}x"]
        rows.append([*row, *(cell(plan, load, name) for name in SERVED for load in loads)])
    head = [f"{title}, {load} at a time" for title, _ in SERVED.values() for load in loads]
    return table(["plan", "tokens of a prompt", "KV places of a request", "requests that fit", *head], rows)


def serving_embedded() -> str:
    """The embedded LLaVA in vLLM."""
    return _serving("serving_embedded.json")


def serving_random() -> str:
    """A larger LLaVA with random weights in vLLM."""
    return _serving("serving_random.json")


TABLES: dict[str, Callable[[], str]] = {
    "onnx_speed": onnx_speed,
    "export_limits": export_limits,
    "export_matrix": export_matrix,
    "serving_methods": serving_methods,
    "scale": scale.costs,
    "scale_assumptions": scale.assumptions,
    "suite": suite,
    "goals": goals,
    "compiled": compiled,
    "first": first,
    "equal_time_clip": equal_time_clip,
    "equal_time_embedded": equal_time_embedded,
    "ablation_val": ablation_val,
    "ablation_test": ablation_test,
    "antialias": antialias,
    "mixes": mixes,
    "ablation_early": ablation_early,
    "ablation_late": ablation_late,
    "ablation_clip": ablation_clip,
    "ablation_tasks": ablation_tasks,
    "ablation_vqa": ablation_vqa,
    "ablation_reid": ablation_reid,
    "cover_vqa": cover_vqa,
    "cover_reid": cover_reid,
    "reid": reid,
    "reid_short": reid_short,
    "reid_merge": reid_merge,
    "reid_modalities": reid_modalities,
    "reid_time": reid_time,
    "vlm": vlm,
    "vlm_short": vlm_short,
    "vlm_time": vlm_time,
    "vlm_trained": vlm_trained,
    "default": default_job,
    "embedded": embedded,
    "speed": speed,
    "tasks": tasks,
    "captions": captions,
    "fusion": fusion,
    "throughput": throughput,
    "video": video,
    "video_short": video_short,
    "attack": attack,
    "zoo": zoo,
    "trained_zoo": trained_zoo,
    "leaderboard": leaderboard,
    "leaderboard_summary": leaderboard_summary,
    "leaderboard_overview": leaderboard_overview,
    "leaderboard_skipped": leaderboard_skipped,
    "family_speed": family_speed,
    "video_speed": video_speed,
    "video_cover": video_cover,
    "serving_embedded": serving_embedded,
    "serving_random": serving_random,
}


CHINESE = {  # what the tables of the Chinese pages say, by what those of the English ones say
    "model, data, score": "模型、数据、指标",
    "CLIP ViT-B/16, 286 photos, top-1": "CLIP ViT-B/16，286 张照片，top-1",
    "embedded CLIP, 2,000 images, top-1": "内置 CLIP，2,000 张图片，top-1",
    "embedded LLaVA, 600 questions, accuracy": "内置 LLaVA，600 个问题，准确率",
    "embedded re-identification, mAP": "内置重识别模型，mAP",
    "| plan |": "| 方案 |",
    "score, %": "得分，%",
    "lost, points": "损失，百分点",
    "speed-up": "加速比",
    "tokens of a clip": "每段视频的词元数",
    "answers right, %": "答对，%",
    "prefill, 3,920 tokens": "预填充，3,920 个词元",
    "prefill, 15,680 tokens": "预填充，15,680 个词元",
}
IN_DOCS = ("index", "results", "cover", "reid", "vlm-pruning", "reliability", "speed", "leaderboard", "export", "serving")
IN_DOCS += ("leaderboard-tables", "learned-selector", "scale", "video")
IN_DOCS += ("tasks/clip", "tasks/vlm", "tasks/reid")
PAGES = ("README.md", "README.zh-CN.md", *(f"docs/{name}.md" for name in IN_DOCS))


def write_table(name: str, page: str) -> str:
    """A table with its markers, in the language of the page."""
    text = TABLES[name]()
    if page == "README.zh-CN.md":
        for english, chinese in CHINESE.items():
            text = text.replace(english, chinese)
    return f"<!-- table:{name} -->\n{text}\n<!-- /table -->"


def main() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        pattern = r"<!-- table:(\w+) -->\n.*?<!-- /table -->"
        text = re.sub(pattern, lambda m, page=page: write_table(m[1], page), text, flags=re.S)
        (ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
