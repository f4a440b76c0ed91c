"""bench --suite: every model runs under every plan of its cases, and all is in one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tokensieve import Plan, cli
from tokensieve.measuring import suite, suite_models
from tokensieve.measuring.growth import PLANS, measure_growth
from tokensieve.models.families import FAMILIES


@pytest.mark.slow
def test_the_quick_suite_runs_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "suite.json"
    assert cli.main(["bench", "--suite", "--quick", "--output", str(output), "--device", "cpu"]) == 0
    said, written = capsys.readouterr(), json.loads(output.read_text())
    models = suite_models.tiny_suite_models()
    expected = [(m.name, case, size) for m in models for size in suite.QUICK_ROUNDS for case in m.plans]
    assert [(row["model"], row["case"], row["batch_size"]) for row in written["rows"]] == expected
    for row in written["rows"]:
        is_vlm = row["kind"] == "vlm"
        assert row["clock"] == "cpu" and row["peak_mib"] > 0 and row["repeats"] == 1
        assert (row["realized"]["first"] if is_vlm else row["realized"]) > 0
    assert written["suite"]["quick"] and written["machine"]["threads"] == 1 and written["versions"]["torch"]
    assert [row["vision_tokens"] for row in written["memory"]] == [81] * 3 + [144] * 3
    assert "less than a minute expected, if nothing else runs" in said.err and "[1/11] tiny open_clip, batch 1" in said.err
    assert "tiny LLaVA" in said.out and "peak memory by vision tokens" in said.out
    line = ["bench", "--suite", "--quick", "--model", "tiny timm", "--batch_size", "2", "--quiet", "--device", "cpu"]
    assert cli.main([*line, "--output", str(tmp_path / "part.json"), "--against", str(output)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].endswith(f"{len(expected) - 3} rows missing, 0 new")
    assert "memory" in json.loads((tmp_path / "part.json").read_text()) and "expected" not in said.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--suite --plan anchor", "--plan does not go with --suite"),
        ("--suite --model ViT-B-17", "Did you mean 'ViT-B-16'"),
        ("--quick", "--quick is a short form of --suite"),
        ("--suite --against nowhere.json", "nowhere.json"),
    ],
)
def test_flags_that_do_not_go_together(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_plans_of_the_suite_parse_and_have_one_name() -> None:
    models = suite_models.suite_models()
    assert len({model.name for model in models}) == len(models)
    for model in models:
        for plan in model.plans.values():
            assert str(Plan.parse(plan)) == plan
    assert {"open_clip", "timm", "hf", "vlm"} == set(FAMILIES) - {"reid"}  # a new family belongs in the suite


def test_the_expected_time_grows_with_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokensieve.measuring.clock import Seconds

    monkeypatch.setattr(suite, "watch", lambda call, device: Seconds(1.0, 1.0))  # 48 GFLOPs a second
    models = suite_models.suite_models()
    tower = [model for model in models if model.name == "ViT-B-16"]
    assert 0 < suite._expected(tower, {1: 7}, False, torch.device("cpu")) < 60
    seconds = [suite._expected(models, {16: count}, True, torch.device("cpu")) for count in (2, 8)]
    assert 2 < seconds[1] / seconds[0] < 3


def test_steps_tell_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((0.0, 60.0, 600.0))  # at the beginning, the second step, the third
    monkeypatch.setattr(suite.time, "monotonic", lambda: next(times))
    steps = suite._Steps([10, 40, 50], quiet=False)
    for name in ("first", "second", "third"):
        steps.start(name)
    said = [line.removeprefix("tokensieve: ") for line in capsys.readouterr().err.splitlines()]
    assert said == ["[1/3] first", "[2/3] second, about 9 minutes left", "[3/3] third, about 10 minutes left"]
    assert [suite._minutes(seconds) for seconds in (5, 61, 119)] == ["less than a minute", "about 1 minute", "about 2 minutes"]


def test_memory_grows_with_tokens_and_not_with_their_square() -> None:
    """Counted, not timed: peak memory of tensors."""
    rows = measure_growth((24, 48), torch.device("cpu"))
    for plan in PLANS:
        small, large = (row for row in rows if row["plan"] == plan)
        assert (small["vision_tokens"], large["vision_tokens"]) == (576, 2304)
        assert large["peak_mib"] < 4.4 * small["peak_mib"] and all(
            row["peak_mib"] < row["peak_mib_full"] for row in (small, large)
        )


@pytest.mark.slow
@pytest.mark.parametrize("model", [m for m in suite_models.suite_models() if m.prompts is not None], ids=lambda m: m.name)
def test_plans_of_the_suite_fit_its_models(model: suite_models.SuiteModel) -> None:
    from tokensieve.measuring.rounds import detached_handle

    torch.manual_seed(0)
    net = model.build().eval()
    assert model.prompts is not None
    inputs = model.prompts(net, 1)
    for plan in model.plans.values():
        with torch.no_grad(), detached_handle(net, plan) as handle:
            net(**inputs, logits_to_keep=1)
        assert handle.ledger and not handle.notes
