"""Sentences below the table of an evaluation: which plans changed nothing, and where anchors lose what another plan with no
more tokens keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tokensieve.plan import Plan
from tokensieve.plan.values import Step
from tokensieve.tasks.base import SampleScores
from tokensieve.tasks.registry import is_percent
from tokensieve.tasks.statistics import grouped_stderr

CLEARLY = 2.0  # standard errors of the difference
FEW_BATCHES = 5  # below which the speed-up of a run means little
HANDLED = {"drop": "drops {}", "zero": "sets {} to 0"}  # by rest, where the tokens that are not selected are lost


def table_remarks(
    rows: Sequence[dict[str, Any]], scores: Sequence[SampleScores | None], metric: str, unit: str, by_pruning_flag: bool
) -> list[str]:
    """What to print below the table of these results.

    scores: of each result, by sample. by_pruning_flag: the first plan is that of --enable_pruning without --prune_rest.
    """
    remarks = []
    for number, row in enumerate(rows):
        done = row["reduction"]
        step = _losing_step(done)
        if step is None:
            continue
        lost = HANDLED[step.rest].format(f"{done['tokens_in'] - done['tokens_out']} of {done['tokens_in']} tokens")
        rivals = list(_rivals(step, done, rows))
        best = max(
            ((*_gain(rows, scores, number, rival, metric), rival) for rival in rivals),
            default=(0.0, 0.0, 0),
            key=lambda gain: gain[0],
        )
        gain, error, rival = best
        if gain > CLEARLY * error:
            share = is_percent(metric, row["task"])
            amount = f"{100 * gain:.1f} ± {100 * error:.1f} points" if share else f"{gain:.3f} ± {error:.3f}"
            plan = rows[rival]["reduction"]["plan"]
            left = rows[rival]["reduction"]["tokens_out"]
            count = "as many" if left == done["tokens_out"] else f"only {left}"
            remarks.append(
                f"{done['plan']} {lost}; {plan} goes on with {count} and is {amount} of {metric} better on the same {unit}s."
            )
        elif not rivals and by_pruning_flag and number == 0:
            remarks.append(
                f"--enable_pruning {lost}; --prune_rest merge merges each of them into the most similar kept token instead."
            )
    return remarks


def unchanged_remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each plan that changed nothing, so that its numbers are not taken for those of fewer tokens."""
    remarks = []
    for done in (row["reduction"] for row in rows):
        if done["changed"] is False and done["plan"] != "none":
            effect = "changed nothing" if done["applied"] else "was not applied"
            remarks.append(f"{done['plan']} {effect}: {done['reason']}. Its numbers are those of the full model.")
    return remarks


def speed_remarks(rows: Sequence[dict[str, Any]], busy: str | None) -> list[str]:
    """What makes the speed-ups of these results mean little. busy: why other programs may have disturbed them."""
    batches = [row["reduction"]["speedup_batches"] for row in rows if "speedup_batches" in row["reduction"]]
    if not batches:
        return []
    remarks = []
    if min(batches) < FEW_BATCHES:
        count = f"{min(batches)} whole batch{'es' if min(batches) > 1 else ''}"
        remarks.append(
            f"The speed-ups are of {count} only and mean little: use more images or a smaller --batch_size, or measure with "
            "tokensieve bench."
        )
    return [*remarks, *([f"{busy[0].upper()}{busy[1:]}."] if busy else [])]


def _losing_step(reduction: dict[str, Any]) -> Step | None:
    """The step of a plan of anchors alone that really drops tokens or sets them to 0."""
    if not reduction["applied"] or reduction["tokens_in"] is None or reduction["tokens_out"] >= reduction["tokens_in"]:
        return None
    steps = Plan.parse(reduction["plan"]).steps
    if len(steps) != 1 or steps[0].method.name != "anchor" or steps[0].rest not in HANDLED:
        return None
    return steps[0]


def _rivals(step: Step, reduction: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[int]:
    """The numbers of the results by the same plan with rest=merge, and by cover to as many tokens or fewer."""
    for number, row in enumerate(rows):
        done = row["reduction"]
        steps = Plan.parse(done["plan"]).steps
        if not done["applied"] or len(steps) != 1 or done["tokens_out"] > reduction["tokens_out"]:
            continue
        other = steps[0]
        is_at_same_position = other.where == step.where or step.rest == "zero"
        is_same_choice = (
            other.method == step.method
            and other.rest == "merge"
            and done["tokens_out"] == reduction["tokens_out"]
            and other.arguments() == step.arguments()
        )
        if is_at_same_position and (is_same_choice or other.method.name == "cover"):
            yield number


def _gain(
    rows: Sequence[dict[str, Any]], scores: Sequence[SampleScores | None], own: int, rival: int, metric: str
) -> tuple[float, float]:
    """What the rival has more of the metric, and its standard error: of the paired difference, if samples have scores."""
    ours, theirs = scores[own], scores[rival]
    if ours is not None and theirs is not None:
        more = theirs.values.double() - ours.values.double()
        return float(more.mean()), grouped_stderr(more, ours.groups)
    metrics = [rows[number]["metrics"] for number in (own, rival)]
    values = [(each.get(metric), each.get(f"{metric}_stderr")) for each in metrics]
    if any(number is None or not math.isfinite(number) for pair in values for number in pair):
        return 0.0, 0.0
    return values[1][0] - values[0][0], math.hypot(values[0][1], values[1][1])
