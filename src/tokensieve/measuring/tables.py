"""The tables that `tokensieve bench` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokensieve.measuring.phases import PHASES


def print_vision_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line for each plan and batch size of a vision model."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"{rows[0]['model']} on {rows[0]['device']}, medians of {rows[0]['repeats']} interleaved rounds"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), collapse_padding=True)
    table.pad_edge = False
    table.add_column("plan", overflow="fold", min_width=14)
    heads = ("B", "seconds: full\n/plan/oracle", "speed\n-up", "its\noracle", "real-\nized", "GFLOPs", "peak\nMiB")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        peak = "-" if row["peak_mib"] is None else f"{row['peak_mib_full']:.0f}>{row['peak_mib']:.0f}"
        table.add_row(
            row["plan"] if row["changed"] else f"{row['plan']} (changed nothing)",
            str(row["batch_size"]),
            "/".join(f"{row[key]:.3g}" for key in ("seconds_full", "seconds", "seconds_oracle")),
            *(f"{row[key]:.2f}x" for key in ("speedup", "speedup_oracle")),
            f"{row['realized']:.3f}",
            f"{row['gflops_full']:.3g}>{row['gflops']:.3g}",
            peak,
        )
    Console().print(table)
    _print_notes(rows)


def print_vlm_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """One table for each plan of a vision-language model; for each batch size the full model, the plan, and their ratios."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    print(
        f"{first['model']} on {first['device']}, medians of {first['repeats']} interleaved rounds; "
        f"{first['vision_tokens']} vision tokens in a prompt of {first['prompt_tokens']}"
    )
    for plan in dict.fromkeys(row["plan"] for row in rows):
        changed = any(row["changed"] for row in rows if row["plan"] == plan)
        title = plan if changed else f"{plan} (changed nothing)"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        times = ("tower\nms", "select\nms", "prefill\nms", "both\nms", "decode\nms", "first\nms", "total\nms")
        for head in ("B", "", *times, "LLM\nGFLOPs", "all\nGFLOPs", "cache\nMiB"):
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        phases = [phase for phase in PHASES if phase != "other"]
        sizes = (("gflops", "llm"), ("gflops", "all"), ("cache", "mib"))
        for row in (row for row in rows if row["plan"] == plan):
            for name, end in (("full", "_full"), ("plan", "")):
                values = [row[f"seconds{end}"][phase] * 1e3 for phase in phases]
                values += [row[f"{kind}{end}"][entry] for kind, entry in sizes]
                table.add_row(str(row["batch_size"]) if end else "", name, *map(_brief, values))
            faster = [row["speedup"].get(phase) for phase in phases]
            smaller = [row[f"{kind}_full"][entry] / row[kind][entry] for kind, entry in sizes]
            table.add_row("", "ratio", *("" if ratio is None else f"{ratio:.2f}x" for ratio in (*faster, *smaller)))
        Console().print(table)
    print(
        "select: what the plan adds (full: the stopwatch itself); both: select + prefill; decode: one new token;\n"
        f"first: until the prompt is read; total: {first['new_tokens']} new tokens; GFLOPs of a prompt: of the language model "
        "with what\nthe plan does in it, and of all up to the first new token"
    )
    _print_notes(rows)


def _print_notes(rows: Sequence[Mapping[str, Any]]) -> None:
    """What the plans do not do on this model."""
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        print(f"note: {note}")


def print_break_even(points: Sequence[Mapping[str, Any]]) -> None:
    """For each plan and batch size the number of vision tokens from which on it is faster."""
    for point in points:
        print(f"Break-even of {point['plan']} (first token; models of this shape with random weights):")
        for size, n in point["vision_tokens"].items():
            measured = ", ".join(
                f"{row['vision_tokens']}: {row['speedup']:.2f}x" for row in point["rows"] if str(row["batch_size"]) == size
            )
            result = "not faster at any number of vision tokens" if n is None else f"faster from {n} vision tokens on"
            print(f"  batch {size}: {result} ({measured})")


def _brief(value: float) -> str:
    """Three digits without an exponent, so that a table fits 80 columns."""
    return f"{value:.3f}" if value < 1 else f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
