"""`tokensieve eval` on the published data sets of questions, as a user runs it, on a tiny LLaVA with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import vqa_files
from tokensieve.cli import main
from tokensieve.tasks.vqa.answering import SHORT
from tokensieve.tasks.vqa.choices import LETTER

Run = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return vqa_files.save_llava(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture
def run(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(*flags) -> .err .out .rows (by the name of their file)."""
    monkeypatch.chdir(tmp_path)

    def go(*flags: object, expect: int = 0) -> SimpleNamespace:
        small = ["--num_workers", "0", "--batch_size", "3", "--max_new_tokens", "3", "--output", "out/{dataset}_{task}.json"]
        code = main(["eval", *(str(flag) for flag in flags), "--model", model, *small])
        printed = capsys.readouterr()
        assert code == expect, printed.err
        rows = {path.name: json.loads(path.read_text()) for path in sorted(Path("out").glob("*"))}
        return SimpleNamespace(err=printed.err, out=printed.out, rows=rows)

    return go


def answers(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """The model says this word to every question."""

    def answer(model: Any, processor: Any, inputs: Any, max_new_tokens: int) -> list[str]:
        return [word] * len(inputs["input_ids"])

    monkeypatch.setattr("tokensieve.tasks.vqa.task.answer", answer)


OPEN, BINARY = ("vqa_score", "exact_match"), ("f1", "accuracy", "precision", "recall", "yes_ratio", "f1_mean", "f1_random")


@pytest.mark.parametrize(
    ("name", "split", "samples", "prompt", "metrics"),
    [
        ("vqav2", "val", 8, SHORT, (*OPEN, "vqa_score_yes_no")),
        ("gqa", "val", 3, SHORT, (*OPEN, "vqa_score_query")),
        ("textvqa", "val", 3, SHORT, OPEN),
        ("pope", "test", 10, SHORT, BINARY),
        ("scienceqa", "test", 3, LETTER, ("accuracy", "accuracy_natural_science")),
        ("mmbench", "dev", 3, LETTER, ("accuracy", "accuracy_kind_1")),
    ],
)
def test_every_data_set_runs_with_its_prompt_and_its_metrics(
    run: Run, tmp_path: Path, name: str, split: str, samples: int, prompt: str, metrics: tuple[str, ...]
) -> None:
    getattr(vqa_files, name)(tmp_path / name)
    done = run("--dataset", f"{name}:{tmp_path / name}", "--split", split, "--plan", "none", "--compare", "random@llm.2:50%")
    assert [file.partition("_vqa")[0] for file in done.rows] == [name, name]
    for row in done.rows.values():
        assert row["task"] == "vqa" and row["run"]["n_samples"] == samples and row["run"]["vqa_prompt"] == prompt
        assert set(metrics) <= set(row["metrics"]) and {f"{metric}_stderr" for metric in metrics} <= set(row["metrics"])
        assert row["run"]["circular"] is False and row["dataset"] == f"{name}:{tmp_path / name}"
    full, cut = sorted(done.rows.values(), key=lambda row: row["reduction"]["applied"])
    headline = metrics[0]
    assert headline in done.out.replace("\n", "_") and full["reduction"]["plan"] == "none"
    assert cut["reduction"]["lost"] == pytest.approx(full["metrics"][headline] - cut["metrics"][headline], abs=1e-12)
    assert cut["reduction"]["lost_stderr"] is not None


def test_the_metrics_of_pope_are_those_of_the_answers(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vqa_files.pope(tmp_path / "pope")
    answers(monkeypatch, "Yes, there is.")
    (row,) = run("--dataset", f"pope:{tmp_path / 'pope'}").rows.values()
    made = row["metrics"]
    assert made["accuracy"] == made["precision"] == 0.5 and made["recall"] == made["yes_ratio"] == 1
    assert made["f1"] == pytest.approx(2 / 3) and made["f1_adversarial"] == 0 and made["recall_adversarial"] is None
    assert made["f1_mean"] == pytest.approx((2 / 3 + 6 / 7 + 0) / 3) and row["run"]["n_unmatched"] == 0


def test_circular_evaluation_is_another_result(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = vqa_files.mmbench(tmp_path / "m")
    answers(monkeypatch, "A")
    (plain,) = run("--dataset", f"mmbench:{file}").rows.values()
    assert plain["metrics"]["accuracy"] == pytest.approx(1 / 3) and "accuracy_circular" not in plain["metrics"]
    done = run("--dataset", f"mmbench:{file}", "--circular", "--plan", "none", "--compare", "random@out:9")
    circular = [row for row in done.rows.values() if row["run"]["circular"]]
    assert len(done.rows) == 3 and len(circular) == 2
    for row in circular:
        assert row["metrics"]["accuracy"] == pytest.approx(1 / 3) and row["metrics"]["accuracy_circular"] == 0
        assert row["run"]["n_samples"] == 10 and row["run"]["n_questions"] == 3 and row["run"]["n_unmatched"] == 0
    assert "have no options to rotate" in run("--task", "vqa", "--circular", "--limit", "1", expect=2).err


def test_missing_and_broken_images_are_listed_and_counted(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "s"
    vqa_files.scienceqa(root)
    (root / "images" / "test" / "5" / "image.png").unlink()
    (root / "images" / "test" / "12" / "image.png").write_bytes(b"no image")
    flags = ("--dataset", f"scienceqa:{root}")
    assert "1 of 3 questions have no image in" in run(*flags, expect=2).err
    done = run(*flags, "--max_broken", "0.7")
    (row,) = done.rows.values()
    assert row["run"]["n_samples"] == 1 and row["run"]["n_skipped"] == 2
    assert "cannot read test/5/image.png (question 5)" in done.err and "cannot read test/12/image.png" in done.err


def test_budgets_are_entrance_and_layer_average_and_agree_with_the_ledger(run: Run, tmp_path: Path) -> None:
    file = vqa_files.jsonl(tmp_path)
    plans = {"none": 36.0, "random@out:18": 18.0, "random@llm.2:6": 16.0, "random@out:18 + random@llm.2:6": 10.0}
    done = run("--dataset", f"jsonl:{file}", "--plan", "none", "--compare", *list(plans)[1:])
    by_plan = {row["reduction"]["plan"]: row["reduction"] for row in done.rows.values()}
    assert {plan: row["tokens_layer_average"] for plan, row in by_plan.items()} == plans
    for plan, row in by_plan.items():
        assert row["tokens_entrance"] == (18 if "@out" in plan else 36)
        stages = {cut["layer"]: cut["tokens_out"] for cut in row["layers"]}
        now, total = stages.get("out", 36), 0
        for layer in range(6):
            now = stages.get(f"llm.{layer}", now)
            total += now
        assert row["tokens_layer_average"] == total / 6
    assert "enter LLM" in done.out and "layer average" in done.out and " 36 / 16.0 " in done.out
    assert main(["build", "out", "--output", "all.csv"]) == 0
    assert "tokens_out,tokens_entrance,tokens_layer_average" in Path("all.csv").read_text().splitlines()[0]
