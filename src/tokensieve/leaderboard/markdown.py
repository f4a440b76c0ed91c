"""The leaderboard as tables in Markdown, one for each task and model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokensieve.leaderboard import curves
from tokensieve.leaderboard.rows import Row
from tokensieve.tasks.registry import is_percent


def scale(row: Row) -> float:
    """By what a score is multiplied to be shown."""
    return 100.0 if is_percent(row["metric"], None) else 1.0


def number(value: float | None, times: float, digits: int = 1) -> str:
    """A score as it is shown; empty for None."""
    return "" if value is None else f"{times * value:.{digits}f}"


def budget_text(budget: float | None) -> str:
    """A budget as it is shown."""
    return "the authors'" if budget is None else f"{100 * budget:g} %"


def title(rows: Sequence[Row]) -> str:
    """The heading of a board."""
    first = rows[0]
    unit = ", %" if scale(first) == 100 else ""
    return f"{first['task']}: {first['model']} on {first['dataset']}, {first['samples']:,} samples, {first['metric']}{unit}"


def table(rows: Sequence[Row]) -> str:
    """One line for each method and placement, the best at twice the speed first: score and speed-up at each budget."""
    times = scale(rows[0])
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None}, reverse=True)
    head = ["method", "place", *(budget_text(budget) for budget in budgets), "authors' own budget", "at 2x"]
    lines = []
    for (method, placement), points in curves.curves(rows).items():
        own = {row["budget"]: row for row in rows if (row["method"], row["placement"]) == (method, placement)}
        at_two = curves.read_off(points, curves.TARGET)
        cells = [_cell(own.get(budget), times) for budget in (*budgets, None)]
        name = f"`{method}`" + (" (control)" if next(iter(own.values()))["control"] else "")
        best = max(row["score"] for row in own.values())
        lines.append(((at_two is None, -(at_two or 0.0), -best), [name, placement, *cells, number(at_two, times)]))
    text = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    text += ["| " + " | ".join(cells) + " |" for _, cells in sorted(lines)]
    return "\n".join([*text, "", f"Full model: {number(rows[0]['score_none'], times)}."])


def _cell(row: Row | None, times: float) -> str:
    """Score, standard error of the paired difference, and speed-up."""
    if row is None:
        return ""
    return f"{number(row['score'], times)} ± {number(row['difference_stderr'], times)} ({curves.speedup(row):.2f}x)"


def tables(rows: Sequence[Row]) -> str:
    """All boards, each under its heading."""
    return "\n\n".join(f"### {title(found)}\n\n{table(found)}" for found in curves.boards(rows).values())


def skipped_table(skipped: Sequence[Row]) -> str:
    """Which methods a model cannot carry out, and why; methods with the same reason share a line."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for entry in skipped:
        key = (entry["model"], entry.get("placement") or "all", general_reason(entry["reason"], entry["method"]))
        found.setdefault(key, {})[f"`{entry['method']}`"] = None
    lines = ["| model | place | methods | reason |", "|---|---|---|---|"]
    for (model, place, reason), methods in sorted(found.items()):
        reason = reason.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {model} | {place} | {', '.join(methods)} | {reason} |")
    return "\n".join(lines)


def general_reason(reason: str, method: str) -> str:
    """The reason without the plan, the method and the budgets at which it was met."""
    found = re.sub(rf"^{method}[@:][^ ]*: ", "", re.sub(r" \(at [^()]*\)$", "", reason))
    found = re.sub(r"^leaves \d+ of \d+ tokens where \d+ are wanted$", "does not reach the smaller budgets", found)
    return re.sub(rf"^{method} ", "", found)
