"""lmms-eval's own command line with our model and our task: `make test-harness` installs it and runs this."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tokensieve.harnesses
from tests.support.processes import alone
from tokensieve.cli import main
from tokensieve.data.vqa_scenes import SceneQuestions
from tokensieve.harnesses import lmms_eval_questions as questions

PLAN, LIMIT = "anchor@out(k=5,m=20)", 24
TASKS = Path(tokensieve.harnesses.__path__[0], "lmms_tasks")
FAILS = """
import runpy
from transformers import LlavaForConditionalGeneration
stock, calls = LlavaForConditionalGeneration.generate, []

def generate(self, *args, **inputs):
    calls.append(1)
    if len(calls) == 3:
        raise ValueError("out of patience")
    return stock(self, *args, **inputs)

LlavaForConditionalGeneration.generate = generate
runpy.run_module("lmms_eval", run_name="__main__", alter_sys=True)
"""


def command(plan: str, folder: Path) -> list[str]:
    """The words behind `python -m lmms_eval`."""
    words = ["--model", "tokensieve", "--model_args", f"plan={plan.replace(',', ';')},dtype=float32", "--device", "cpu"]
    words += ["--include_path", str(TASKS), "--tasks", "tokensieve_questions", "--batch_size", "1"]
    return [*words, "--limit", str(LIMIT), "--output_path", str(folder / "harness")]


def test_the_questions_of_the_task() -> None:
    row = {"number": 3, "question": "what?", "answer": "red"}
    item = SceneQuestions("embedded-questions", split="test", limit=10)[3]
    (message,) = questions.messages(row)
    picture, text = message["content"]
    assert list(picture["url"].getdata()) == list(item.image.getdata()) and text["text"] == "what?"
    assert questions.score(row, [" Red."]) == {"vqa_score": 1.0} and questions.score(row, ["blue"]) == {"vqa_score": 0.0}


@pytest.mark.slow
def test_the_same_score_as_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lmms_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # the questions are cached there
    done = alone(["-m", "lmms_eval", *command(PLAN, tmp_path)], tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = (tmp_path / "harness").rglob("*results.json")
    written = json.loads(file.read_text())["results"]["tokensieve_questions"]
    options = ["--task", "vqa", "--plan", PLAN, "--limit", LIMIT, "--num_workers", 0, "--batch_size", 8, "--quiet"]
    assert main([*map(str, ["eval", *options]), "--output", str(tmp_path / "own.json")]) == 0
    own = json.loads((tmp_path / "own.json").read_text())["metrics"]["vqa_score"]
    assert written["vqa_score,none"] == pytest.approx(own)


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["generate raises", "no such method"])
def test_an_error_ends_the_run(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No score, the reason in one line, and an exit code that a script notices."""
    pytest.importorskip("lmms_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    program = ["-c", FAILS] if reason == "generate raises" else ["-m", "lmms_eval"]
    plan, told = (PLAN, "ValueError: out of patience") if reason == "generate raises" else ("grit@out:4", "grit")
    done = alone([*program, *command(plan, tmp_path)], tmp_path)
    assert done.returncode == 1, done.stdout[-2000:]
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("tokensieve: error")]
    assert told in said and "Traceback" not in done.stderr
    assert "vqa_score" not in done.stdout and not list(tmp_path.rglob("*results.json"))
