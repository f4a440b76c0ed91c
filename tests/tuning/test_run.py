"""`tokensieve tune` as a user types it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tokensieve
from tests.support import hf_models
from tokensieve import files
from tokensieve.cli import main
from tokensieve.models import loading
from tokensieve.models.registry import open_tower
from tokensieve.plan import Plan
from tokensieve.tuning.evaluator import Evaluator

# A tiny model is hardly faster with fewer tokens, so the goal is low.
QUICK = ["--budget_minutes", "0.001", "--batch_size", "4", "--speedup", "1.2"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tune(tiny_clip: SimpleNamespace, photos: Path) -> Any:
    """Tunes the tiny CLIP on the photos; the exit code and the result, if there is one."""

    def run(*flags: str) -> tuple[int, dict[str, Any]]:
        model = ["--model", tiny_clip.name, "--pretrained", tiny_clip.weights]
        code = main(["tune", *model, "--images", str(photos), "--output", "out", *QUICK, *flags])
        file = Path("out/tune.json")
        return code, json.loads(file.read_text()) if file.exists() else {}

    return run


def test_a_second_search_in_the_same_folder_is_refused(tune: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with files.FolderLock(Path("out"), "tokensieve tune"):
        assert tune("--trials", "12") == (2, {})
    assert "tokensieve tune already runs in out (this process" in capsys.readouterr().err
    assert [path.name for path in Path("out").iterdir()] == [".lock"]


def test_a_search(tune: Any, capsys: pytest.CaptureFixture[str], tiny_clip: SimpleNamespace) -> None:
    code, found = tune("--trials", "12")
    printed = capsys.readouterr().out
    assert code == 0 and f"best plan: {found['plan']}\n" in printed and "Pareto front" in printed and "controls" in printed
    assert Path("out/tune.png").stat().st_size > 10_000
    rows = {row["plan"]: row for row in found["measured"]}
    assert found["images"]["used"] == found["images"]["measured"] == 14 and found["images"]["unreadable"] == {}
    roles = {name.partition("@")[0].partition("(")[0] for name, row in rows.items() if row["role"] == "control"}
    assert roles == {"resize", "random", "grid"}
    assert set(found["front"]) <= set(rows) and found["plan"] in rows and found["trials"]
    for row in rows.values():
        assert 0 < row["distance"] < 2 and row["speedup"] > 0 and row["speedup_oracle"] > 0 and row["gflops"] > 0
    best = rows[found["plan"]]
    if found["reaches_target"]:
        assert best["speedup"] >= 1.2 and best["more_than_best"] == 0
        assert all(best["distance"] <= row["distance"] for row in rows.values() if row["speedup"] >= 1.2)
    assert {"tokensieve", "torch"} <= set(found["versions"])
    # the plan can be used by its file
    model = tiny_clip.make()[0]
    assert str(Plan.parse("@out/tune.json")) == found["plan"]
    with tokensieve.apply(model, "@out/tune.json") as handle:
        assert str(handle.plan) == found["plan"]
    assert main(["bench", "--model", tiny_clip.name, "--plan", "@out/tune.json", "--repeats", "1", "--quiet"]) == 0


def test_a_stopped_search_goes_on(tune: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measures, calls = Evaluator.measures, []

    def counted(self: Evaluator, plan: Plan, n: int) -> Any:
        calls.append(str(plan))
        if len(calls) == 6:
            raise KeyboardInterrupt
        return measures(self, plan, n)

    monkeypatch.setattr(Evaluator, "measures", counted)
    code, stopped = tune("--trials", "20")
    first = stopped["trials"]
    assert code == 130 and len(first) >= 5 and not stopped["is_measured"]
    assert "the same command again goes on" in capsys.readouterr().err
    code, found = tune("--trials", "20")
    assert code == 0 and found["trials"][: len(first)] == first and len(found["trials"]) > len(first) and found["is_measured"]
    done = len(calls)
    measured = {row["plan"] for row in found["measured"]}
    code, again = tune("--trials", str(len(found["trials"])))
    assert code == 0 and again["trials"] == found["trials"] and not set(calls[done:]) & measured


def test_a_number_of_tokens(tune: Any) -> None:
    code, found = tune("--trials", "6", "--keep", "5", "--methods", "cover,grid", "--quiet")
    assert code == 0 and {row["tokens"] for row in found["trials"]} == {5}
    assert {row["plan"].partition("@")[0] for row in found["trials"]} <= {"cover", "grid"}
    assert {row["tokens"] for row in found["measured"]} == {5}  # no control of resizing alone: 3 x 2 patches are too many


def test_unreadable_images_are_in_the_result(tune: Any, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(photos, "mine")
    Path("mine/damaged.png").write_bytes(Path("mine/01.png").read_bytes()[:100])
    code, found = tune("--images", "mine", "--trials", "4")
    assert code == 0 and list(found["images"]["unreadable"]) == ["mine/damaged.png"] and found["images"]["used"] == 14
    assert "1 cannot be read: mine/damaged.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speedup", "1"], "--speedup 1: the plan is to be faster than the model"),
        (["--speedup", "nan"], "--speedup nan"),
        (["--images", "nowhere"], "--images nowhere: there is no such file or folder"),
        (["--questions", "q.txt", "--model_type", "timm"], "read no text; leave it out"),
        (["--methods", "learned"], "trained weights"),
        (["--methods", "covre"], "Did you mean 'cover'"),
        (["--output", "/proc/nothing"], "cannot write /proc/nothing"),
        (["--budget_minutes", "0"], "not above 0"),
    ],
)
def test_errors_are_one_line_before_the_model_is_loaded(
    tune: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert tune(*flags)[0] == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_the_model_cannot_reach_is_an_error_before_any_work(
    tune: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for work in ("seconds_per_image", "compute_full", "speedups"):
        monkeypatch.setattr(Evaluator, work, lambda *_, **__: pytest.fail("images were run"))
    assert tune("--speedup", "900")[0] == 2
    assert "--speedup 900 cannot be reached: the fastest plan" in capsys.readouterr().err
    assert tune("--keep", "24")[0] == 2
    assert "--keep 24: an image has 24 tokens" in capsys.readouterr().err


def test_other_images_in_the_same_folder_are_an_error(
    tune: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--trials", "2", "--quiet")[0] == 0
    shutil.copytree(photos, "mine")
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert tune("--images", "mine")[0] == 2
    assert "out holds a search with another images" in capsys.readouterr().err


def test_optuna_is_needed(tune: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    assert tune()[0] == 2 and "optuna is not installed" in capsys.readouterr().err


def test_models_without_images_of_their_own_need_some(tiny_clip: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--model", tiny_clip.name, "--pretrained", tiny_clip.weights]) == 2
    assert "--images is missing" in capsys.readouterr().err


@pytest.mark.parametrize("can_be_resized", [True, False])
def test_hugging_face_models(
    can_be_resized: bool, photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be resized is searched without it, and the output says so."""
    model = hf_models.save("siglip2", Path("model"))
    if not can_be_resized:
        monkeypatch.setattr(
            "tokensieve.tuning.outline.open_tower", lambda net: replace(open_tower(net), resize=None, no_resize_reason="no")
        )
    flags = ["--model_type", "hf", "--model", model, "--images", str(photos), "--output", "out", "--trials", "4", *QUICK]
    assert main(["tune", *flags]) == 0
    found = json.loads(Path("out/tune.json").read_text())
    resized = [row["plan"] for row in (*found["trials"], *found["measured"]) if "resize" in row["plan"]]
    assert bool(resized) == can_be_resized
    assert ("searched without resize: no" in capsys.readouterr().out) != can_be_resized


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "measures"),
    [
        ([], {"distance"}),
        (["--model", "sieve-llava-8"], {"distance", "agreement"}),
        (["--model_type", "reid"], {"distance", "nearest", "rank_correlation"}),
    ],
)
def test_embedded_models(flags: list[str], measures: set[str]) -> None:
    few = ["--limit", "8", "--trials", "2", "--methods", "cover,resize", "--output", "out"]
    assert main(["tune", *flags, *few, *QUICK]) == 0
    found = json.loads(Path("out/tune.json").read_text())
    assert found["images"]["used"] == 8 and found["plan"]
    for row in found["measured"]:
        assert all(row[name] >= 0 for name in measures) and row["distance"] > 0


@pytest.mark.slow
def test_questions_and_a_model_of_timm(photos: Path, backbone: Path) -> None:
    Path("q.txt").write_text("What is in the image?\nWhich colour is it?\n")
    images = ["--images", str(photos), "--limit", "8", "--trials", "2", "--methods", "cover", *QUICK]
    llava = ["--model", str(backbone), "--questions", "q.txt", "--keep", "20", "--output", "vlm"]
    assert main(["tune", *llava, *images, "--quiet"]) == 0
    found = json.loads(Path("vlm/tune.json").read_text())
    assert found["images"]["questions"] == ["What is in the image?", "Which colour is it?"]
    assert {row["tokens"] for row in found["trials"]} == {20}
    timm = ["--model_type", "timm", "--model", "vit_tiny_patch16_224", "--output", "timm"]
    assert main(["tune", *timm, *images, "--quiet"]) == 0
    assert "random weights" in " ".join(json.loads(Path("timm/tune.json").read_text())["notes"])
