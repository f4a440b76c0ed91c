"""The sentences below the table: where anchors lose what another plan of the same number of tokens keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.evaluation import Run
from tokensieve.evaluation.remarks import table_remarks
from tokensieve.tasks.base import SampleScores

DROP, MERGE, COVER = "anchor(k=10,m=50,alpha=0.5)", "anchor(k=10,m=50,alpha=0.5,rest=merge)", "cover:60"
SELECTION = "anchor@out(k=10,m=50,alpha=0.5,rest=zero)"


def row(plan: str, acc1: float = 0.5, tokens_out: int = 60, applied: bool = True, **metrics: float) -> dict[str, Any]:
    reduction = {"plan": plan, "applied": applied, "tokens_in": 196, "tokens_out": tokens_out}
    return {"task": "zeroshot_classification", "metrics": {"acc1": acc1, **metrics}, "reduction": reduction}


def scores(hits: int, total: int = 100) -> SampleScores:
    """The first samples are right."""
    return SampleScores((torch.arange(total) < hits).float(), torch.arange(total))


def remarks(*rows: dict[str, Any], hits: tuple[int | None, ...], by_flag: bool = False) -> list[str]:
    samples = [None if right is None else scores(right) for right in hits]
    return table_remarks(rows, samples, "acc1", "image", by_flag)


@pytest.mark.parametrize("plan", [MERGE, COVER])
def test_a_plan_that_keeps_more_is_named_with_the_paired_difference(plan: str) -> None:
    """40 of 100 samples are gained and none is lost: 40.0 points, standard error sqrt(0.4 * 0.6 / 100)."""
    (sentence,) = remarks(row("none"), row(DROP), row(plan), hits=(95, 50, 90))
    assert sentence == (
        f"{DROP} drops 136 of 196 tokens; {plan} goes on with as many and is 40.0 ± 4.9 points of acc1 better on the same "
        "images."
    )


def test_the_better_of_both_is_named_once() -> None:
    (sentence,) = remarks(row(DROP), row(MERGE), row(COVER), hits=(50, 80, 90), by_flag=True)
    assert COVER in sentence and "rest=merge" not in sentence


def test_a_difference_within_two_standard_errors_is_not_named() -> None:
    assert remarks(row(DROP), row(COVER), hits=(50, 53), by_flag=True) == []  # 3 ± 1.7 points
    assert len(remarks(row(DROP), row(COVER), hits=(50, 55))) == 1  # 5 ± 2.2
    assert remarks(row(DROP), row(COVER), hits=(50, 40)) == []


@pytest.mark.parametrize(
    "other",
    [
        row("cover:64", tokens_out=64),
        row("cover@6:60"),
        row("anchor:60(k=60,rest=merge)"),
        row("anchor@6(k=10,m=50,alpha=0.5,rest=merge)"),
        row("learned:60(rest=merge)"),
        row(COVER, applied=False),
    ],
    ids=lambda other: other["reduction"]["plan"],
)
def test_plans_that_differ_in_more_are_not_compared(other: dict[str, Any]) -> None:
    assert remarks(row(DROP), other, hits=(50, 99)) == []


def test_cover_with_fewer_tokens_is_named_with_their_number() -> None:
    (sentence,) = remarks(row(DROP), row("cover:32", tokens_out=32), hits=(50, 99))
    assert "cover:32 goes on with only 32" in sentence


def test_selection_at_the_output_is_compared_with_cover_at_any_position() -> None:
    (sentence,) = remarks(row(SELECTION), row(COVER), hits=(50, 90))
    assert sentence.startswith(f"{SELECTION} sets 136 of 196 tokens to 0; cover:60")


def test_the_flag_alone_names_the_other_flag() -> None:
    (sentence,) = remarks(row(DROP), hits=(50,), by_flag=True)
    assert sentence == (
        "--enable_pruning drops 136 of 196 tokens; --prune_rest merge merges each of them into the most similar kept token "
        "instead."
    )
    assert remarks(row(DROP), hits=(50,)) == []
    assert remarks(row(DROP, tokens_out=196), hits=(50,), by_flag=True) == []
    assert remarks(row(DROP, applied=False), hits=(50,), by_flag=True) == []
    assert remarks(row(MERGE), hits=(50,), by_flag=True) == []


def test_without_scores_of_samples_the_standard_errors_of_both_count() -> None:
    drop, cover = row(DROP, 0.5, acc1_stderr=0.03), row(COVER, 0.6, acc1_stderr=0.04)
    assert remarks(drop, cover, hits=(None, None)) == []  # 10 ± 5 points
    (sentence,) = remarks(drop, row(COVER, 0.7, acc1_stderr=0.04), hits=(None, None))
    assert "20.0 ± 5.0 points" in sentence
    assert remarks(row(DROP, 0.5), row(COVER, 0.7), hits=(None, None)) == []


def test_the_sentence_is_printed_below_the_table(run: Run) -> None:
    flags = ["--enable_pruning", "--k_anchors", 2, "--top_m", 4]
    done = run(*flags, quiet=False)
    assert "--enable_pruning drops 18 of 24 tokens; --prune_rest merge merges each" in done.out
    assert "--prune_rest merge" not in run(*flags, "--prune_rest", "merge", quiet=False).out
    assert "--prune_rest merge" not in run("--plan", "anchor(k=2,m=4)", quiet=False).out
