"""The tables that `tokensieve bench` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokensieve.measuring import terminal

Rows = Sequence[Mapping[str, Any]]
PHASES = {  # of a vision-language model: their headings
    "tower": "tower",
    "selection": "select",
    "prefill": "prefill",
    "prefill_with_selection": "both",
    "decode": "decode",
    "first": "first",
    "total": "total",
}
CLOCKS = {"cpu": "CPU time", "wall": "wall time"}
LEGEND = (
    "select: what the plan adds (full: the stopwatch itself); both: select + prefill; decode: one new token;\n"
    "first: until the first logits; total: {new_tokens} new tokens; realized: share of the oracle's speed-up;\n"
    "GFLOPs of a prompt: of the language model with what the plan does in it, and of all up to the first new\n"
    "token; peak: memory of reading the prompts"
)


def spread(row: Mapping[str, Any], name: str, phase: str | None = None, digits: int = 2, unit: str = "x") -> str:
    """A ratio with its quartiles, such as 1.67x (1.65-1.70); nothing if there is none."""
    values = [row[f"{name}{end}"] if phase is None else row[f"{name}{end}"].get(phase) for end in ("", "_low", "_high")]
    if values[0] is None:
        return ""
    middle, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle}{unit} ({low}-{high})"


def add_ratio_columns(table: Any, *heads: str) -> None:
    """Columns for ratios with their quartiles, which are below them on a narrow screen."""
    from rich.console import Console

    is_narrow = Console().width < 110
    for head in heads:
        width = 11 if head == "speed-up" else 13  # of the quartiles
        table.add_column(head, justify="right", min_width=width, max_width=width if is_narrow else None)


def print_vision_rows(rows: Rows) -> None:
    """One line for each plan and batch size of a vision model."""
    from rich import box
    from rich.table import Table

    table = Table(title=_about(rows[0]), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), collapse_padding=True)
    table.pad_edge = False
    table.add_column("plan", overflow="fold", min_width=12)
    for head in ("B", "ms: full\n/plan/oracle"):
        table.add_column(head, justify="right", no_wrap=True)
    add_ratio_columns(table, "speed-up", "realized")
    for head in ("GFLOPs", "peak\nMiB"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        peak = "-" if row["peak_mib"] is None else f"{row['peak_mib_full']:.0f}>{row['peak_mib']:.0f}"
        table.add_row(
            row["plan"] if row["changed"] else f"{row['plan']} (changed nothing)",
            str(row["batch_size"]),
            "/".join(_brief(1e3 * row[key]) for key in ("seconds_full", "seconds", "seconds_oracle")),
            spread(row, "speedup"),
            spread(row, "realized", digits=3, unit=""),
            f"{row['gflops_full']:.3g}>{row['gflops']:.3g}",
            peak,
        )
    terminal.print_table(table)


def print_vlm_rows(rows: Rows) -> None:
    """One table for each plan of a vision-language model; for each batch size the full model, the plan, and their ratios."""
    from rich import box
    from rich.table import Table

    first = rows[0]
    print(f"{_about(first)}; {first['vision_tokens']} vision tokens in a prompt of {first['prompt_tokens']}")
    for plan in dict.fromkeys(row["plan"] for row in rows):
        changed = any(row["changed"] for row in rows if row["plan"] == plan)
        title = plan if changed else f"{plan} (changed nothing)"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        sizes = {"LLM\nGFLOPs": ("gflops", "llm"), "all\nGFLOPs": ("gflops", "all"), "cache\nMiB": ("cache", "mib")}
        for head in ("B", "", *(f"{name}\nms" for name in PHASES.values()), *sizes, "peak\nMiB"):
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        chosen = [row for row in rows if row["plan"] == plan]
        for row in chosen:
            for name, end in (("full", "_full"), ("plan", "")):
                values = [row[f"seconds{end}"][phase] * 1e3 for phase in PHASES]
                values += [row[f"{kind}{end}"][entry] for kind, entry in sizes.values()] + [row[f"peak_mib{end}"]]
                table.add_row(str(row["batch_size"]) if end else "", name, *map(_brief, values))
            faster = [row["speedup"].get(phase) for phase in PHASES]
            smaller = [row[f"{kind}_full"][entry] / row[kind][entry] for kind, entry in sizes.values()]
            if row["peak_mib"] is not None:
                smaller.append(row["peak_mib_full"] / row["peak_mib"])
            table.add_row("", "ratio", *("" if ratio is None else f"{ratio:.2f}x" for ratio in (*faster, *smaller)))
        terminal.print_table(table)
        for row in chosen:
            print(f"  batch {row['batch_size']}: {_in_one_line(row)}")
    print(LEGEND.format(new_tokens=first["new_tokens"]))


def _in_one_line(row: Mapping[str, Any]) -> str:
    """The ratios that count, with their spread."""
    words = []
    for phase in ("first", "decode", "total"):
        if faster := spread(row, "speedup", phase):
            reached = spread(row, "realized", phase, digits=3, unit="")
            words.append(f"{phase} {faster}" + (f", realized {reached}" if reached else ""))
    reason = row["no_oracle_reason"]
    return "; ".join(words) + (f" (no oracle: {reason})" if reason else "")


def print_notes(rows: Rows) -> None:
    """What the plans do not do on this model."""
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        print(f"note: {note}")


def print_pays_from(pays: Mapping[str, int | None], rows: Rows) -> None:
    """For each plan the batch size from which on it is faster, in one line."""
    for plan, batch_size in pays.items():
        found = [row for row in rows if row["plan"] == plan]
        result = "pays at no batch size" if batch_size is None else f"pays from batch size {batch_size} on"
        sizes = ", ".join(str(row["batch_size"]) for row in found)
        print(f"{plan} {result} with {found[0]['vision_tokens']} vision tokens (measured: {sizes})")


def print_break_even(points: Rows) -> None:
    """For each plan the number of vision tokens from which on it is faster at each batch size, in one line."""
    for point in points:
        words = []
        for size, n in point["vision_tokens"].items():
            rows = [row for row in point["rows"] if str(row["batch_size"]) == size]
            result = "at no number of vision tokens" if n is None else f"from {n} vision tokens on"
            measured = ", ".join(f"{row['vision_tokens']}: {row['speedup']:.2f}x" for row in rows)
            words.append(f"batch {size} {result} ({measured})")
        print(f"Break-even of {point['plan']} (models of this shape with random weights): {'; '.join(words)}")


def _about(row: Mapping[str, Any]) -> str:
    return f"{row['model']} on {row['device']}, {CLOCKS[row['clock']]}, medians of {row['repeats']} interleaved rounds"


def _brief(value: float | None) -> str:
    """Three digits without an exponent, so that a table fits 80 columns."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def print_suite_rows(rows: Rows) -> None:
    """One line for each model, plan and batch size of the suite."""
    from rich import box
    from rich.table import Table

    print(f"{CLOCKS[rows[0]['clock']]} on {rows[0]['device']}; of vision-language models: until the first logits, decode steps")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("model, plan", overflow="fold", min_width=24)
    table.add_column("B", justify="right")
    add_ratio_columns(table, "speed-up", "realized", "decode\nrealized")
    table.add_column("peak\nMiB", justify="right", no_wrap=True)
    model = None
    for row in rows:
        if row["model"] != model:
            model = row["model"]
            table.add_row(model)
        phases = ("first", "decode") if row["kind"] == "vlm" else (None,)
        reached = [spread(row, "realized", phase, digits=3, unit="") for phase in phases]
        peak = "-" if row["peak_mib"] is None else f"{row['peak_mib_full']:.0f}>{row['peak_mib']:.0f}"
        cells = [spread(row, "speedup", phases[0]), reached[0], *(reached[1:] or [""]), peak]
        table.add_row(f"  {row['plan']}", str(row["batch_size"]), *cells)
    terminal.print_table(table)


def print_family_rows(rows: Rows) -> None:
    """One line for each family, number of tokens and plan: until the first logits, and of a decode step."""
    from rich import box
    from rich.table import Table

    first = rows[0]
    about = f"{CLOCKS[first['clock']]} on {first['device']}, width {first['width']}, {first['repeats']} rounds"
    print(f"{about}; until the first logits, decode steps")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("family, plan", overflow="fold", min_width=20)
    table.add_column("tokens", justify="right", no_wrap=True)
    add_ratio_columns(table, "speed-up", "realized", "decode\nrealized")
    family = None
    for row in rows:
        if row["model"] != family:
            family = row["model"]
            table.add_row(family)
        reached = [spread(row, "realized", phase, digits=3, unit="") for phase in ("first", "decode")]
        reached[0] = reached[0] or f"no oracle: {row['no_oracle_reason']}"
        table.add_row(f"  {row['plan']}", f"{row['vision_tokens']:,}", spread(row, "speedup", "first"), *reached)
    terminal.print_table(table)


def print_growth(rows: Rows) -> None:
    """Peak memory over the number of vision tokens."""
    for plan in dict.fromkeys(row["plan"] for row in rows):
        found = [row for row in rows if row["plan"] == plan]
        if found[0]["peak_mib"] is not None:
            sizes = ", ".join(f"{row['vision_tokens']:,}: {row['peak_mib_full']:.1f}>{row['peak_mib']:.1f}" for row in found)
            print(f"peak memory by vision tokens, MiB of full>{plan}: {sizes}")
