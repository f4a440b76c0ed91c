"""The tables that an evaluation prints."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve.measuring import terminal
from tokensieve.measuring.tables import add_ratio_columns, spread
from tokensieve.tasks.registry import TASKS

if TYPE_CHECKING:
    from rich.table import Table


def print_table(rows: Sequence[dict[str, Any]], metric: str, unit: str = "image") -> None:
    """One line for each plan: tokens, metric, what is lost of it, FLOPs, speed. The full model first, then the best plan.

    Below the tokens of a vision-language model are those that enter its language model, and their mean over its layers.
    One more metric has a column of its own if all plans stay on one line; otherwise the others are in a table below.
    """
    metric = metric if metric in rows[0]["metrics"] else next(iter(rows[0]["metrics"]))
    more = _more_metrics(rows, metric)
    ordered = sorted(rows, key=lambda row: (row["reduction"]["plan"] != "none", -_number(row["metrics"][metric])))
    if len(more) == 1 and terminal.fits(wider := _table(ordered, metric, more, unit)):
        terminal.print_table(wider)
        return
    terminal.print_table(_table(ordered, metric, [], unit))
    if more:
        lines = [[row["reduction"]["plan"], *(_with_error(row["metrics"], name) for name in more)] for row in ordered]
        print_grid("more metrics", ["plan", *(name.replace("_", "\n") for name in more)], lines)


def _table(rows: Sequence[dict[str, Any]], metric: str, beside: Sequence[str], unit: str) -> Table:
    """beside: metrics with a column of their own."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    first, run = rows[0], rows[0]["run"]
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
    beside_heads = [name.replace("_", "\n") for name in beside]
    for name in (tokens_head, head, *beside_heads, "lost" if has_losses else f"{unit}s/s", "GFLOPs"):
        table.add_column(name, justify="right", no_wrap=True)
    add_ratio_columns(table, "speed-up")
    for row in rows:
        done, numbers = row["reduction"], row["metrics"]
        plan = f"{done['plan']}{_unchanged(done)}"
        tokens = "-" if done["tokens_in"] is None else f"{done['tokens_in']} -> {done['tokens_out']}"
        speed = done["images_per_second"]
        table.add_row(
            plan,
            f"{tokens}{_decoder_budget(done)}",
            _with_error(numbers, metric),
            *(_text(numbers.get(name)) for name in beside),
            _lost(done) if has_losses else "-" if speed is None else f"{speed:.1f}",
            "-" if done["gflops"] is None else f"{done['gflops']:.3g}",
            _speed_up(done),
        )
    return table


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


def _more_metrics(rows: Sequence[dict[str, Any]], metric: str) -> list[str]:
    """The metrics that the task shows beside the headline, where they were measured."""
    task = TASKS.get(rows[0]["task"])
    measured = [name for name in rows[0]["metrics"] if any(_number(row["metrics"].get(name)) > -math.inf for row in rows)]
    return [name for name in task.more_metrics(measured) if name != metric] if task else []


def _speed_up(reduction: dict[str, Any]) -> str:
    """Times the speed of the full model, with the quartiles over batches."""
    if reduction["plan"] == "none":
        return "1.00x"
    return spread(reduction, "speedup") if "speedup" in reduction else "-"


def _lost(reduction: dict[str, Any]) -> str:
    return f"{reduction['lost']:.3f} ± {reduction['lost_stderr']:.3f}" if "lost" in reduction else ""


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else -math.inf


def _with_error(numbers: dict[str, Any], metric: str) -> str:
    value, error = _text(numbers[metric]), numbers.get(f"{metric}_stderr")
    return value if value == "-" or error is None else f"{value} ± {error:.4f}"


def _text(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4f}"
