"""`tokensieve build`: results as the rows of one CSV file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokensieve.evaluation.results import read_results
from tokensieve.files import check_writable, csv_cell, replace_file
from tokensieve.tasks.registry import all_tasks

# The columns: first clip_benchmark's, then the metrics of the tasks, then what we add. Others follow, sorted.
HEAD = ("dataset", "model", "pretrained", "task", "language", "model_fullname")
REDUCTION = (
    "plan",
    "applied",
    "changed",
    "reason",
    "layers",
    "tokens_in",
    "tokens_out",
    "tokens_entrance",
    "tokens_layer_average",
    "token_fusion",
    "token_fusion_weight",
    "token_fusion_temperature",
    "token_fusion_anchors",
    "lost",
    "lost_stderr",
    "gflops",
    "gflops_full",
    "gflops_llm",
    "gflops_llm_full",
    "images_per_second",
    "images_per_second_full",
    "speedup",
    "speedup_low",
    "speedup_high",
    "speedup_batches",
    "seconds_per_question",
    "seconds_per_question_full",
    "notes",
)


def build_csv(files: Sequence[str], output: str) -> int:
    """Fold result files (and folders of them) into one CSV with its columns in a fixed order; the number of rows."""
    rows = [_flatten_result(result) for result in read_results(files)]
    path = Path(output)
    check_writable(path)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    names = columns(rows)
    writer.writerow(map(csv_cell, names))
    writer.writerows([csv_cell(row.get(name, "")) for name in names] for row in rows)
    replace_file(path, text.getvalue().encode())
    return len(rows)


def columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """All columns of these rows: known ones in their order, then the others sorted."""
    present = {name for row in rows for name in row}
    metrics = dict.fromkeys(metric for task in all_tasks() for metric in task.metrics)
    known = [*HEAD, *(name for metric in metrics for name in (metric, f"{metric}_stderr")), *REDUCTION]
    others = sorted(present.difference(known), key=lambda name: (name.startswith("run_"), name))
    return [name for name in known if name in present] + others


def _flatten_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """One result as one flat row: metrics, clip_benchmark's keys, `reduction` by its names, `run` as run_*."""
    row: dict[str, Any] = dict(result["metrics"])
    row.update({name: value for name, value in result.items() if name not in ("metrics", "reduction", "run")})
    row["model_fullname"] = f"{result['model']} {result['pretrained']}"
    done = dict(result.get("reduction") or {})
    if "layers" in done:
        done["layers"] = " ".join(f"{cut['layer']}:{cut['tokens_in']}->{cut['tokens_out']}" for cut in done["layers"])
    if "notes" in done:
        done["notes"] = "; ".join(done["notes"])
    row.update(done)
    row.update({f"run_{name}": value for name, value in (result.get("run") or {}).items()})
    return {name: _cell(value) for name, value in row.items()}


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value
