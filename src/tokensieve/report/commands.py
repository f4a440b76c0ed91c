"""How to repeat the results of a section: their settings, and the commands to type."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape

from tokensieve.errors import UserError
from tokensieve.evaluation.flags import eval_flags
from tokensieve.flags import PLUGIN
from tokensieve.report.fields import Result, flatten_values, mapping_at, plan_text, value_text

NOT_SETTINGS = ("busy", "key", "newest", "seconds", "time")
NAMED_FIRST = ("model", "pretrained", "dataset", "task", "plan")  # these stand in every command


def render_settings(rows: Sequence[Result]) -> str:
    """What the rows of a section were made with: what they share in a table, commands, and what differs row by row."""
    runs = [
        {name: value for name, value in flatten_values(mapping_at(row, "run")).items() if name not in NOT_SETTINGS}
        for row in rows
    ]
    names = list(dict.fromkeys(name for run in runs for name in run))
    lines = []
    for name in names:
        values = list(dict.fromkeys(value_text(run.get(name)) for run in runs))
        lines.append(f"<tr><th scope='row'>{escape(name)}</th><td>{escape(' | '.join(values))}</td></tr>")
    together: dict[str, list[Result]] = {}
    for row in rows:
        together.setdefault(shlex.join(_command(row, [])), []).append(row)
    whole = "\n".join(shlex.join(_command(group[0], group)) for group in together.values())
    each = "\n".join(shlex.join(_command(row, [row])) for row in rows)
    table = f"<div class='wide'><table class='settings'><tbody>{''.join(lines)}</tbody></table></div>" if lines else ""
    return (
        f"<details><summary>to repeat it</summary>{table}"
        f"<p>All of it, in one pass over the data:</p><pre>{escape(whole)}</pre>"
        f"<p>Each row by itself, in the order of the table:</p><pre>{escape(each)}</pre></details>"
    )


def _command(result: Result, rows: Sequence[Result]) -> list[str]:
    """What to type for these rows, which share their settings with result; defaults of `eval` are left out."""
    run, done = mapping_at(result, "run"), mapping_at(result, "reduction")
    words = ["tokensieve", "eval", "--model", str(result["model"])]
    words += ["--pretrained", str(result["pretrained"])] if result["pretrained"] else []
    words += ["--dataset", str(result["dataset"])]
    words += ["--task", str(result["task"])] if result.get("task") else []
    values = {**run, "language": result.get("language") or "en", "num_workers": run.get("workers")}
    values.pop("weights", None)  # the fingerprint of the model's; those of --weights are among the arguments
    values |= mapping_at(run, "arguments")
    if rows and not any(_trained(row) for row in rows):
        values.pop("weights", None)
    values |= {name: done[name] for name in ("token_fusion", "token_fusion_weight", "token_fusion_temperature") if name in done}
    if str(run.get("device", "")).startswith("cpu") and not run.get("amp"):
        values.pop("amp", None)
    for flag in (PLUGIN, *(flag for group in eval_flags().values() for flag in group)):
        if flag.dest in values and flag.dest not in NAMED_FIRST:
            words += flag.words(values[flag.dest])
    plans = list(dict.fromkeys(plan_text(row) for row in rows))
    if plans:
        words += ["--plan", plans[0]] + (["--compare", *plans[1:]] if plans[1:] else [])
    return words


def _trained(result: Result) -> bool:
    """Whether a method of the plan has trained weights: --weights is refused where none has."""
    from tokensieve.plan import Plan

    try:
        return Plan.parse(plan_text(result)).is_trained
    except UserError:
        return False
