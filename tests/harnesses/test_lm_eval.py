"""The model and the task for lm-eval, end to end with the real harness: `make test-harness` installs it and runs this."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import alone
from tokensieve.cli import main
from tokensieve.data.vqa_scenes import SceneQuestions
from tokensieve.harnesses.tasks import questions

PLAN, LIMIT = "anchor@out(k=5,m=20)", 24


def test_the_questions_of_the_task() -> None:
    row = {"number": 3, "question": "?", "answer": "red"}
    item = SceneQuestions("embedded-questions", split="test", limit=10)[3]
    assert list(questions.images(row)[0].getdata()) == list(item.image.getdata())
    assert questions.text({"question": item.question}) == f"<image>{item.question}"
    assert questions.score(row, [" Red."]) == {"vqa_score": 1.0} and questions.score(row, ["blue"]) == {"vqa_score": 0.0}


@pytest.mark.slow
def test_the_same_score_as_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    words = ["run", "--model", "tokensieve", "--model_args", f"plan={PLAN.replace(',', ';')},dtype=float32"]
    words += ["--tasks", "tokensieve_questions", "--limit", str(LIMIT), "--apply_chat_template", "--batch_size", "8"]
    words += ["--device", "cpu", "--output_path", str(tmp_path / "harness")]
    done = alone(["-m", "tokensieve.harnesses.lm_eval", *words], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "harness").rglob("results_*.json")
    written = json.loads(file.read_text())
    assert written["config"]["plan"] == PLAN
    options = ["--task", "vqa", "--plan", PLAN, "--limit", LIMIT, "--num_workers", 0, "--batch_size", 8, "--quiet"]
    assert main([*map(str, ["eval", *options]), "--output", str(tmp_path / "own.json")]) == 0
    own = json.loads((tmp_path / "own.json").read_text())["metrics"]["vqa_score"]
    assert written["results"]["tokensieve_questions"]["vqa_score,none"] == pytest.approx(own)
