"""`tokensieve eval --task vqa` as a user runs it, on a tiny LLaVA with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import vqa_files
from tests.support.pictures import picture
from tests.support.processes import two_processes
from tokensieve import embedded
from tokensieve.cli import main
from tokensieve.cutting.handle import apply
from tokensieve.data import vqa
from tokensieve.drawing import show_questions
from tokensieve.evaluation.planned_model import PlannedModel
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.plan import Plan
from tokensieve.tasks.vqa.answering import SHORT, answer_questions
from tokensieve.tasks.vqa.scores import exact_match, soft_score

Run = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return vqa_files.save_llava(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture
def run(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(*flags) -> .err .out .by_plan; the tiny model, answers of four tokens."""
    monkeypatch.chdir(tmp_path)

    def go(*flags: object, expect: int = 0) -> SimpleNamespace:
        given = [str(flag) for flag in flags]
        defaults = {"--model": model, "--num_workers": "0", "--batch_size": "3", "--max_new_tokens": "4", "--output": "out/"}
        rest = [word for flag, value in defaults.items() if flag not in given for word in (flag, value)]
        code = main(["eval", *given, *rest])
        said = capsys.readouterr()
        assert code == expect, said.err
        made = {path.name: json.loads(path.read_text()) for path in sorted(Path("out").glob("*.json"))}
        return SimpleNamespace(
            err=said.err, out=said.out, files=made, by_plan={row["reduction"]["plan"]: row for row in made.values()}
        )

    return go


PLANS = ("--plan", "none", "--compare", "random@llm.2:50%", "anchor@out:9", "random@1:18 + random@llm.3:9")


def test_every_plan_answers_the_same_questions_in_one_pass(run: Run, model: str, tmp_path: Path) -> None:
    file = vqa_files.jsonl(tmp_path)
    done = run("--dataset", f"jsonl:{file}", *PLANS)
    loaded = load_vlm.load(model)
    items = [item for item in vqa.load(f"jsonl:{file}")]
    for plan, row in done.by_plan.items():
        with apply(loaded.model, plan, seed=0) as sieve:
            answers = answer_questions(loaded.model, loaded.processor, items, 3, 4, SHORT)
        scores = [soft_score(answer, item.answers) for answer, item in zip(answers, items, strict=True)]
        assert row["metrics"]["vqa_score"] == pytest.approx(sum(scores) / 3) and "vqa_score_stderr" in row["metrics"]
        exact = [exact_match(answer, item.answers) for answer, item in zip(answers, items, strict=True)]
        assert row["metrics"]["exact_match"] == pytest.approx(sum(exact) / 3)
        assert row["reduction"]["layers"] == [vars(line) for line in sieve.ledger]
        assert row["task"] == "vqa" and row["run"]["n_samples"] == 3 and row["run"]["vqa_prompt"] == SHORT
    stages = {plan: row["reduction"]["layers"] for plan, row in done.by_plan.items()}
    assert [line["tokens_out"] for line in stages[PLANS[-1]]] == [18, 9]
    assert [line["layer"] for line in stages[PLANS[-1]]] == ["1", "llm.3"] and stages["none"] == []
    assert (tmp_path / "out" / f"questions__{model.replace('/', '_')}_en_vqa_none.json").exists()


def test_what_a_plan_costs_is_told_for_all_and_for_the_language_model(run: Run, tmp_path: Path) -> None:
    done = run("--dataset", f"jsonl:{vqa_files.jsonl(tmp_path)}", *PLANS)
    full = done.by_plan["none"]["reduction"]
    assert full["tokens_in"] == full["tokens_out"] == 36 and full["applied"] is False
    assert 0 < full["gflops_llm"] < full["gflops"] and full["gflops"] == full["gflops_full"]
    for plan, row in done.by_plan.items():
        cost = row["reduction"]
        assert cost["gflops_full"] == full["gflops"] and cost["gflops_llm_full"] == full["gflops_llm"]
        assert cost["seconds_per_question"] == pytest.approx(1 / cost["images_per_second"])
        assert cost["seconds_per_question_full"] == pytest.approx(1 / cost["images_per_second_full"])
        if plan != "none":
            assert cost["applied"] and cost["gflops_llm"] < full["gflops_llm"] and cost["gflops"] < full["gflops"]
    inside, outside = (done.by_plan[plan]["reduction"] for plan in ("random@llm.2:50%", "anchor@out:9"))
    assert inside["gflops"] - inside["gflops_llm"] == pytest.approx(full["gflops"] - full["gflops_llm"])  # the tower is whole
    assert outside["gflops_llm"] < inside["gflops_llm"] and (outside["tokens_out"], inside["tokens_out"]) == (9, 18)


def test_vqav2_with_a_broken_image_and_kinds(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "vqa"
    vqa_files.vqav2(root)
    (root / "val2014" / "COCO_val2014_000000000010.jpg").write_bytes(b"no image")
    flags = ("--dataset", "vqav2", "--dataset_root", root, "--split", "val")
    assert "more than --max_broken 0.01 allows" in run(*flags, expect=2).err
    done = run(*flags, "--max_broken", "0.3")
    (row,) = done.by_plan.values()
    assert row["run"]["n_samples"] == 6 and row["run"]["n_skipped"] == 2
    assert "cannot read COCO_val2014_000000000010.jpg (question 10000)" in done.err
    assert {"vqa_score_yes_no", "vqa_score_other", "exact_match_other_stderr"} <= set(row["metrics"])
    assert "not published" in run("--dataset", "vqav2", "--dataset_root", root, expect=2).err
    (root / "val2014" / "COCO_val2014_000000000011.jpg").unlink()
    assert "2 of 8 questions have no image" in run(*flags, expect=2).err  # before anything is read


def test_the_embedded_questions_are_the_default_and_blind_is_another_file(run: Run) -> None:
    few = ("--task", "vqa", "--limit", "6")
    done = run(*few)
    (row,) = done.by_plan.values()
    assert row["dataset"] == "embedded-questions" and row["run"]["vqa_prompt"] == "{question}" and row["run"]["limit"] == 6
    assert row["run"]["model_type"] == "vlm" and row["run"]["n_samples"] == 6 and "vqa_score" in done.out
    blind = run(*few, "--blind")
    assert len(blind.files) == 2 and [row["run"]["blind"] for row in blind.files.values()] == [False, True]
    again = run(*few, "--blind", "--skip_existing")
    assert "made by the same settings: skipped" in again.err
    other = run(*few, "--vqa_prompt", "{question} yes or no ?", "--skip_existing")
    assert "is taken; this result is in" in other.err  # another prompt is another run
    assert main(["build", "out", "--output", "all.csv"]) == 0 and main(["report", "out", "--images", "0"]) == 0
    head = Path("all.csv").read_text().splitlines()[0].split(",")
    assert head.index("vqa_score") < head.index("gflops_llm") < head.index("seconds_per_question")
    assert "vqa_score" in Path("report.html").read_text()


def test_the_embedded_model_is_the_default(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "llava_path", lambda name: Path(model))
    name = embedded.LLAVA
    assert main(["eval", "--task", "vqa", "--limit", "2", "--num_workers", "0", "--output", "out/", "--quiet"]) == 0
    assert [path.name for path in Path("out").iterdir()] == [f"embedded-questions__{name}_en_vqa.json"]
    assert run("--model", name, "--limit", "2", "--dataset", "embedded-questions-all").files
    assert "there is no file" not in run("--model", name, "--limit", "1").err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--task", "vqa", "--dataset", "embedded"], "embedded has labels, but the task vqa needs questions"),
        (
            ["--task", "linear_probe", "--dataset", "embedded-questions"],
            "has questions, but the task linear_probe needs labels: give --task vqa",
        ),
        (["--dataset", "embedded", "embedded-questions"], "in a separate run"),
        (["--model_type", "vlm", "--dataset", "embedded"], "answers questions"),
        (["--model_type", "hf", "--task", "vqa"], "needs vlm"),
        (["--task", "vqa", "--token_fusion", "weighted"], "has none"),
        (["--task", "vqa", "--vqa_prompt", "what?"], "has no {question}"),
        (["--task", "vqa", "--language", "de"], "--language de"),
        (["--task", "vqa", "--skip_load"], "--skip_load works with"),
        (["--dataset", "embeded-questions"], "Did you mean 'embedded-questions'"),
        (["--dataset", "jsonl:nowhere.jsonl"], "there is no nowhere.jsonl"),
        (["--dataset", "gqa", "--split", "val", "--dataset_root", "nowhere"], "dorarad/gqa"),
        (["--task", "vqa", "--plan", "random@llm.9:50%"], "llm"),
        (["--task", "vqa", "--model", "sieve-lava-8"], "Did you mean 'sieve-llava-8'"),
    ],
)
def test_mistakes_are_explained_before_anything_runs(run: Run, flags: list[str], said: str) -> None:
    import re

    done = run(*flags, expect=2)
    assert re.search(said, done.err) and done.err.count("\n") == 1 and not done.files


def test_flags_of_questions_without_any_are_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--dataset", "embedded", "--limit", "1", "--num_workers", "0", "--quiet", "--blind"]) == 0
    assert "--blind has no effect on zeroshot_classification" in capsys.readouterr().err


def test_a_run_in_which_no_prompt_has_an_image_says_that_the_plan_changed_nothing(model: str) -> None:
    loaded = load_vlm.load(model).model
    ids = torch.tensor([[1, 7, 11, 12, 13]])

    def text_only(net: Any, inputs: Any) -> Any:
        return net(input_ids=inputs["input_ids"]).logits

    planned = PlannedModel(loaded, Plan.parse("random@llm.2:50%"), 0, nullcontext, run=text_only)
    with torch.inference_mode():
        planned({"input_ids": ids}, samples=torch.arange(1))
    assert planned.unchanged_reason == "no token was removed from any image"
    assert any("no image" in note for note in planned.notes)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(run: Run, model: str, tmp_path: Path) -> None:
    flags = ["--dataset", "embedded-questions", "--limit", "10", "--plan", "random@llm.2:50%"]
    alone = run(*flags).by_plan
    shared = tmp_path / "shared"
    rest = ["--model", model, "--num_workers", "0", "--batch_size", "3", "--max_new_tokens", "4", "--output", f"{shared}/"]
    done = two_processes(["-m", "tokensieve", "eval", *flags, *rest, "--quiet"], tmp_path)
    assert done.returncode == 0, done.stderr
    (file,) = shared.glob("*.json")
    row = json.loads(file.read_text())
    assert row["metrics"] == alone["random@llm.2:50%"]["metrics"] and row["run"]["processes"] == 2


def test_a_picture_tells_the_question_and_both_answers(run: Run, model: str, tmp_path: Path) -> None:
    flags = ["--model", model, "--model_type", "vlm", "--plan", "random@1:18 + random@llm.3:9"]
    assert main(["show", "embedded:3", *flags, "--output", "one.png"]) == 0 and Path("one.png").stat().st_size > 1000
    photo = tmp_path / "photo.png"
    picture(0, 0).save(photo)
    assert main(["show", str(photo), *flags]) == 2  # nothing was asked
    assert main(["show", str(photo), *flags, "--question", "what colour is this ?"]) == 0
    loaded = load_vlm.load(model)
    asked = [show_questions.read("embedded:3", 0, None), show_questions.read(str(photo), 1, "is this red ?")]
    items = [item for _, item, _ in asked]
    full = answer_questions(loaded.model, loaded.processor, items)
    bands = show_questions.make_bands(loaded, [Plan.parse(flags[-1]), Plan.parse("none")], asked)
    for of_image, item, said in zip(bands, items, full, strict=True):
        assert item.question in of_image[0].name and repr(said) in of_image[0].name
        assert [stage.layer for stage in of_image[0].stages] == ["1", "llm.3"] and of_image[0].stages[-1].tokens_out == 9
        assert of_image[1].notes == [f"answer: {said!r}"] and of_image[1].stages == []
    assert "expected: 'right of'" in bands[0][0].name and "expected" not in bands[1][0].name


def test_inputs_stay_as_the_processor_made_them_in_a_worker(run: Run, tmp_path: Path) -> None:
    file = vqa_files.jsonl(tmp_path)
    here = run("--dataset", f"jsonl:{file}").by_plan["none"]["metrics"]
    assert run("--dataset", f"jsonl:{file}", "--num_workers", "1").by_plan["none"]["metrics"] == here
    assert torch.is_inference_mode_enabled() is False
