"""One result as it is written: metrics, reduction, run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from tokensieve.data.source import Source
from tokensieve.evaluation.jobs import Job
from tokensieve.evaluation.results import Stored
from tokensieve.plan import Plan
from tokensieve.tasks.base import Record, SampleScores, Task
from tokensieve.tasks.statistics import grouped_stderr


def rows_without_model(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """The `reduction` of results whose features come from an earlier run."""
    unknown = dict.fromkeys(("applied", "changed", "tokens_in", "tokens_out", "gflops", "gflops_full"))
    speeds = dict.fromkeys(("images_per_second", "images_per_second_full"))
    reason = "the features are of an earlier run (--skip_load)"
    return [{"plan": str(plan), **unknown, "reason": reason, "layers": [], **speeds, "notes": []} for plan in plans]


def keep_earlier_measurements(row: dict[str, Any], earlier: Stored | None) -> dict[str, Any]:
    """The row with measurements of an earlier result of the same settings, where this one, from stored features, has none."""
    measured = earlier.result.get("reduction") if earlier is not None else None
    if not measured:
        return row
    if row["reduction"]["applied"] is None:  # there was no model to measure
        return {**row, "reduction": measured}
    now = {name: value for name, value in row["reduction"].items() if value is not None}
    return {**row, "reduction": {**measured, **now}}


def add_losses(rows: Sequence[dict[str, Any]], scores: Sequence[SampleScores | None]) -> None:
    """Adds to every result what its plan loses of the main metric against the full model, sample by sample in the same run.

    `lost` is the mean of the differences and `lost_stderr` its standard error: smaller than that of two separate runs, since
    both plans see the same samples.
    """
    full = next((score for row, score in zip(rows, scores, strict=True) if row["reduction"]["plan"] == "none"), None)
    if full is None:
        return
    for row, score in zip(rows, scores, strict=True):
        if score is not None and row["reduction"]["plan"] != "none":
            lost = full.values - score.values
            row["reduction"] |= {"lost": float(lost.mean()), "lost_stderr": grouped_stderr(lost, full.groups)}


def make_row(
    job: Job,
    task: Task,
    records: dict[str, list[Record]],
    reduction: dict[str, Any],
    run: dict[str, Any],
    args: argparse.Namespace,
    data: dict[str, Source],
) -> dict[str, Any]:
    source = next(reversed(data.values()))
    return {
        "dataset": job.dataset,
        "model": job.model,
        "pretrained": job.pretrained,
        "task": job.task,
        "metrics": task.metrics(records),
        "language": job.language,
        **({"classnames": source.classes} if args.dump_classnames and source.classes else {}),
        **({"templates": source.templates} if args.dump_templates and source.templates else {}),
        "reduction": reduction,
        "run": run,
    }
