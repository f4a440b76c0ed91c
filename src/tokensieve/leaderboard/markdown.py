"""The leaderboard as tables in Markdown, one for each task and model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokensieve.leaderboard import curves
from tokensieve.leaderboard.rows import Row
from tokensieve.tasks.registry import is_percent

LITTLE = 0.01  # of the score (of the full model's where it is no share): what the summary calls little
SHOWN = 4  # methods in a cell of the summary


def scale(row: Row) -> float:
    """By what a score is multiplied to be shown."""
    return 100.0 if is_percent(row["metric"], None) else 1.0


def number(value: float | None, times: float) -> str:
    """A score as it is shown, with one digit in per cent and two of other scores; empty for None."""
    return "" if value is None else f"{times * value:.{1 if times == 100 else 2}f}"


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


def summary(rows: Sequence[Row]) -> str:
    """A line for each board: the fastest rows that lose little, and what is left at twice the speed."""
    head = ["task", "samples", "full model", "fastest that lose at most 1 point in 100", "best at 2x", "`resize` at 2x"]
    lines = []
    for found in curves.boards(rows).values():
        times, first = scale(found[0]), found[0]
        good = [row for row in found if row["difference"] >= -LITTLE * (1 if times == 100 else row["score_none"]) - 1e-9]
        fastest: dict[str, Row] = {}
        for row in sorted(good, key=lambda row: row["time_ratio"]):
            fastest.setdefault(row["method"], row)
        some = [f"`{row['plan']}` {curves.speedup(row):.2f}x" for row in [*fastest.values()][:SHOWN]]
        at_two: dict[str, float] = {}
        for (method, _), points in curves.curves(found).items():
            value = curves.read_off(points, curves.TARGET)
            if value is not None:
                at_two[method] = max(value, at_two.get(method, value))
        reached = sorted(at_two.items(), key=lambda pair: -pair[1])
        best = ", ".join(f"`{method}` {number(value, times)}" for method, value in reached[:SHOWN])
        small = number(curves.read_off(curves.resize_curve(found), curves.TARGET), times)
        name = f"{first['task']}, {first['model']}{'' if times == 100 else ' (' + first['metric'] + ')'}"
        lines.append([name, f"{first['samples']:,}", number(first["score_none"], times), ", ".join(some), best, small])
    return _markdown(head, lines)


def overview(rows: Sequence[Row], budget: float) -> str:
    """A line for each method: what it loses in each task at a budget, where its authors put it, else at the common place."""
    found: dict[tuple[str, str, str], list[Row]] = {}  # of each task the board with most samples
    for part in curves.boards([row for row in rows if row["budget"] == budget]).values():
        about = (part[0]["task"], part[0]["dataset"], part[0]["model"])
        if about not in found or found[about][0]["samples"] < part[0]["samples"]:
            found[about] = part
    head = ["method", *(task for task, _, _ in found)]
    lines = []
    for method in sorted({row["method"] for row in rows}):
        cells, lost = [], []
        for part in found.values():
            own = [row for row in part if row["method"] == method]
            places = list(dict.fromkeys(row["placement"] for row in own))
            if not own:
                cells.append("")
                continue
            row = own[places.index("authors")] if "authors" in places else own[0]
            star = "" if row["placement"] == "authors" else "*"
            lost.append(row["difference"] / row["score_none"])
            cells.append(f"{number(row['difference'], scale(row))} ({curves.speedup(row):.2f}x){star}")
        control = any(row["control"] for row in rows if row["method"] == method)
        if lost:
            order = (2 * len(lost) < len(found), -sum(lost) / len(lost))  # means over few boards say less, so they are last
            lines.append((order, [f"`{method}`" + (" (control)" if control else ""), *cells]))
    return _markdown(head, [cells for _, cells in sorted(lines)])


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    text = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*text, *("| " + " | ".join(cells) + " |" for cells in lines)])


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
    """The reason without the plan and the method."""
    found = re.sub(rf"^{method}[@:][^ ]*: ", "", reason)
    found = re.sub(r"^leaves \d+ of \d+ tokens where \d+ are wanted$", "does not reach the smaller budgets", found)
    return re.sub(rf"^{method} ", "", found)
