"""The tables that an evaluation prints."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokensieve.measuring import terminal


def print_table(rows: Sequence[dict[str, Any]], metric: str, unit: str = "image") -> None:
    """One line for each plan: tokens, metric, what is lost of it, FLOPs, speed. The full model first, then the best plan.

    Below the tokens of a vision-language model are those that enter its language model, and their mean over its layers.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    first, run = rows[0], rows[0]["run"]
    metric = metric if metric in first["metrics"] else next(iter(first["metrics"]))
    weights = os.path.basename(first["pretrained"])
    model = f"{first['model']} ({weights})" if weights else first["model"]
    headline = f" by {run['headline']}" if "headline" in run else ""
    title = f"{model} on {first['dataset']}{headline}, {run['n_samples']} {unit}s"
    table = Table(
        title=f"{title}, {run['device']}, {run['dtype']}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0)
    )
    table.add_column("plan", overflow="fold", min_width=12)
    head = metric if len(metric) <= 16 else metric.replace("_", "\n")
    has_losses = any("lost" in row["reduction"] for row in rows)
    has_decoder = any("tokens_entrance" in row["reduction"] for row in rows)
    tokens_head = "tokens\nenter LLM /\nlayer average" if has_decoder else "tokens"
    for name in (tokens_head, head, "lost" if has_losses else f"{unit}s/s", "GFLOPs", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: (row["reduction"]["plan"] != "none", -_number(row["metrics"][metric]))):
        done, numbers = row["reduction"], row["metrics"]
        plan = f"{done['plan']}{_unchanged(done)}"
        tokens = "-" if done["tokens_in"] is None else f"{done['tokens_in']} -> {done['tokens_out']}"
        speed, full = done["images_per_second"], done["images_per_second_full"]
        table.add_row(
            plan,
            f"{tokens}{_decoder_budget(done)}",
            _with_error(numbers, metric),
            _lost(done) if has_losses else "-" if speed is None else f"{speed:.1f}",
            "-" if done["gflops"] is None else f"{done['gflops']:.3g}",
            "-" if speed is None or full is None else f"{speed / full:.2f}x",
        )
    terminal.print_table(table)


def print_grid(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print texts in columns; the first one names the line."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    terminal.print_table(table)


def print_lines(lines: Sequence[str]) -> None:
    """Print sentences, each on a line of its own."""
    for line in lines:
        print(line)


def print_files(files: Sequence[Path]) -> None:
    """Print where the results are."""
    if len(files) == 1:
        print(f"result: {files[0]}")
    else:
        folder = files[0].parent
        print(f"{len(files)} results in the folder {folder}:")
        for file in files:
            print(f"  {file.name}")


def _unchanged(reduction: dict[str, Any]) -> str:
    """What to print behind a plan whose numbers are those of the full model."""
    if reduction["plan"] == "none" or reduction["changed"] is not False:
        return ""
    return " (changed nothing)" if reduction["applied"] else " (not applied)"


def _decoder_budget(reduction: dict[str, Any]) -> str:
    """A second line for a vision-language model: vision tokens that enter the language model / their mean over its layers."""
    if "tokens_entrance" not in reduction:
        return ""
    return f"\n{reduction['tokens_entrance']} / {reduction['tokens_layer_average']:.1f}"


def _lost(reduction: dict[str, Any]) -> str:
    return f"{reduction['lost']:.3f} ± {reduction['lost_stderr']:.3f}" if "lost" in reduction else ""


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else -math.inf


def _with_error(numbers: dict[str, Any], metric: str) -> str:
    value, error = numbers[metric], numbers.get(f"{metric}_stderr")
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
