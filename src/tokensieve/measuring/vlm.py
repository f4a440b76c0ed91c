"""TODO docstring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokensieve.device import find_device
from tokensieve.measuring.break_even import break_even, print_points
from tokensieve.measuring.generation import BATCHES, PLAN, measure, prompts
from tokensieve.measuring.phases import PHASES, fresh_handle
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan


def run(
    model: str | None = None,
    plans: Sequence[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
    repeats: int = 10,
    new_tokens: int = 16,
    text_tokens: int = 16,
    device: str | None = None,
    output: str | None = None,
    quiet: bool = False,
    weights: Weights = None,
    crossing: bool = False,
) -> list[dict[str, Any]]:
    """Measures every plan at every batch size; prints tables, writes JSON to output, returns the rows.

    model: as load_vlm takes it; crossing: look for the break-even point too.
    """
    from tokensieve import embedded, files, provenance
    from tokensieve.models.loading import vlm as load_vlm

    parsed = [Plan.parse(plan) for plan in plans or [PLAN]]
    if output is not None:
        files.check_writable(Path(output))
    where = find_device(device)
    name = model or embedded.LLAVA
    net = load_vlm.load(name, where).model
    about = {"model": name, "model_type": "vlm", "device": str(where)}
    rows, points = [], []
    for plan in parsed:
        handle = fresh_handle(net, plan, weights)
        for batch_size in batch_sizes or BATCHES:
            row = measure(net, prompts(net, batch_size, text_tokens), handle, repeats, new_tokens, quiet=quiet)
            rows.append(about | row)
        if crossing:
            points.append(break_even(net, handle, batch_sizes or BATCHES, text_tokens=text_tokens, quiet=quiet))
    if output is not None:
        if Path(output).exists():
            files.back_up(Path(output))
        files.write_json(Path(output), {"rows": rows, "break_even": points, "versions": provenance.versions()})
    if not quiet:
        _print_table(rows)
        print_points(points)
    return rows


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    print(
        f"{first['model']} on {first['device']}, medians of {first['repeats']} interleaved rounds; "
        f"{first['vision_tokens']} vision tokens in a prompt of {first['prompt_tokens']}"
    )
    for plan in dict.fromkeys(row["plan"] for row in rows):
        table = Table(title=plan, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        times = ("tower\nms", "select\nms", "prefill\nms", "both\nms", "decode\nms", "first\nms", "total\nms")
        for head in ("B", "", *times, "LLM\nGFLOPs", "all\nGFLOPs", "cache\nMiB"):
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        shown = [phase for phase in PHASES if phase != "other"]
        held = (("gflops", "llm"), ("gflops", "all"), ("cache", "mib"))
        for row in (row for row in rows if row["plan"] == plan):
            for name, end in (("full", "_full"), ("plan", "")):
                spent = [row[f"seconds{end}"][phase] * 1e3 for phase in shown] + [row[f"{kind}{end}"][of] for kind, of in held]
                table.add_row(str(row["batch_size"]) if end else "", name, *map(_brief, spent))
            faster = [row["speedup"].get(phase) for phase in shown]
            less = [row[f"{kind}_full"][of] / row[kind][of] for kind, of in held]
            table.add_row("", "ratio", *("" if ratio is None else f"{ratio:.2f}x" for ratio in (*faster, *less)))
        Console().print(table)
    print(
        "select: what the plan adds (full: the stopwatch itself); both: select + prefill; decode: one new token;\n"
        f"first: until the prompt is read; total: {first['new_tokens']} new tokens; GFLOPs of a prompt: of the language model "
        "with what\nthe plan does in it, and of all up to the first new token"
    )


def _brief(value: float) -> str:
    """Three digits, without exponents, so that a table fits 80 columns."""
    return f"{value:.3f}" if value < 1 else f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
