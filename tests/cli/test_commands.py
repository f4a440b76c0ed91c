"""Whole commands, as a user types them, on what ships and on models of other libraries."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.support import hf_models
from tests.support.paths import ROOT
from tokensieve import embedded
from tokensieve.cli import main
from tokensieve.models.loading.registry import MODEL_TYPES, ModelType

FEW = ["--limit", "16", "--batch_size", "8", "--num_workers", "0", "--quiet"]
PLANS = ["--plan", "none", "--compare", "anchor:60(rest=merge)", "learned:60(rest=merge)"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def results(folder: Path = Path("out")) -> dict[str, dict]:
    """The results by plan; every metric is a number, every share has its standard error."""
    read = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for row in read:
        assert row["metrics"] and all(isinstance(value, int | float | None) for value in row["metrics"].values())
        for name in row["metrics"]:
            if "acc" in name or "recall" in name:
                assert name.endswith("_stderr") or f"{name}_stderr" in row["metrics"], name
    return {row["reduction"]["plan"]: row for row in read}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "task", "metric"),
    [
        (["--dataset", "embedded-captions", "--recall_k", "1", "5"], "zeroshot_retrieval", "text_retrieval_recall@5"),
        (["--dataset", "embedded-selection"], "image_caption_selection", "acc"),
        (
            ["--dataset", "embedded", "--task", "linear_probe", "--val_proportion", "0.25", "--fewshot_k", "1"],
            "linear_probe",
            "lp_acc1",
        ),
        (["--dataset", "embedded-heldout"], "zeroshot_classification", "acc1"),
    ],
)
def test_every_task_on_the_embedded_data_under_three_plans(flags: list[str], task: str, metric: str) -> None:
    assert main(["eval", *flags, *PLANS, *FEW, "--output", "out/{plan}.json"]) == 0
    found = results()
    assert list(found) == ["anchor:60(rest=merge)", "learned:60(rest=merge)", "none"]
    for plan, row in found.items():
        assert row["task"] == task and 0 <= row["metrics"][metric] <= 1
        assert row["reduction"]["tokens_out"] == (196 if plan == "none" else 60)
        assert ("trained" in row["reduction"]) == ("learned" in plan)
    assert main(["report", "out", "--images", "0"]) == 0 and main(["build", "out"]) == 0
    page, table = Path("report.html").read_text(), Path("benchmark.csv").read_text()
    assert all(plan in page for plan in found) and metric in table.splitlines()[0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="captions are judged by Java programs")
def test_captioning_by_the_embedded_coca() -> None:
    flags = ["--task", "captioning", "--dataset", "embedded-captions", "--model", "sieve-coca-8"]
    assert main(["eval", *flags, *FEW, "--plan", "grid:60", "--output", "out/{plan}.json"]) == 0
    (row,) = results().values()
    assert row["metrics"]["CIDEr"] > 0 and 0 < row["metrics"]["Bleu_4"] <= 1 and "METEOR" in row["metrics"]


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_hugging_face_folder_is_evaluated(kind: str, here: Path, shards: Path) -> None:
    folder = hf_models.save(kind, here)
    data = ["--dataset", "wds/colours", "--dataset_root", str(shards)]
    flags = ["--model_type", "hf", "--model", folder, *data, "--plan", "none", "--compare", "anchor@1:3(k=2)"]
    assert main(["eval", *flags, *FEW, "--output", "out/{plan}.json"]) == 0
    cut = results()["anchor@1:3(k=2)"]
    assert cut["reduction"]["applied"] and cut["reduction"]["tokens_out"] == 3 and cut["run"]["model_type"] == "hf"


@pytest.mark.parametrize("library", ["hf", "timm"])
def test_a_model_without_a_text_tower_is_probed_and_says_so_otherwise(
    library: str, here: Path, faces: Path, capsys: pytest.CaptureFixture
) -> None:
    model = hf_models.save("dinov2", here) if library == "hf" else "test_vit"
    flags = ["--model_type", library, "--model", model, "--dataset", "fer2013", "--dataset_root", str(faces), *FEW]
    probe = ["--task", "linear_probe", "--train_split", "test", "--fewshot_epochs", "1", "--plan", "grid@1:50%"]
    assert main(["eval", *flags, *probe, "--output", "out/{plan}.json"]) == 0
    (row,) = results().values()
    assert row["reduction"]["tokens_out"] < row["reduction"]["tokens_in"] and "lp_acc1" in row["metrics"]
    capsys.readouterr()
    assert main(["eval", *flags]) == 2
    assert "linear_probe" in capsys.readouterr().err


@pytest.mark.slow
def test_show_draws_plans_side_by_side(capsys: pytest.CaptureFixture) -> None:
    Image.new("RGB", (90, 40), "grey").save("my photo.png")
    plans = ["--plan", "anchor@2:120 + anchor@4:60(rest=merge)", "--compare", "learned:32(rest=merge)", "pool:49"]
    assert main(["show", "my photo.png", "embedded:3", *plans, "--output", "drawn.png"]) == 0
    assert capsys.readouterr().out.strip() == "drawn.png"
    assert Image.open("drawn.png").width > 400


def bench_toy(args: argparse.Namespace) -> None:
    print(f"{args.model} is measured by its own type")


def test_bench_of_a_model_type_that_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    here = __name__
    MODEL_TYPES.add(ModelType("toy", "a toy", check=f"{here}:check", load=f"{here}:load", bench=f"{here}:bench_toy"))
    try:
        assert main(["bench", "--model_type", "toy", "--model", "linear"]) == 0
        assert capsys.readouterr().out == "linear is measured by its own type\n"
        earlier = str(ROOT / "benchmarks" / "results" / "bench_hf.json")
        assert main(["bench", "--model_type", "toy", "--model", "linear", "--against", earlier]) == 2
        assert "the bench of --model_type toy tells none" in capsys.readouterr().err
    finally:
        MODEL_TYPES.remove("toy")


# ------------------------------------------------------------------------------------------------------ files that are written

WRITERS = (
    ["eval", "--dataset", "embedded", "--plan", "grid:60", *FEW],
    ["build", "one.json"],
    ["report", "one.json", "--images", "0"],
    ["show", "embedded:3", "--plan", "grid:60"],
    ["bench", "--model", embedded.MODEL, "--plan", "grid:60", "--repeats", "1", "--batch_size", "1", "--quiet"],
    ["families"],
)


@pytest.fixture(params=WRITERS, ids=lambda words: words[0])
def words(request: pytest.FixtureRequest, here: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that writes a file, without its --output."""
    monkeypatch.setattr("tokensieve.measuring.families.table", list)  # it takes a while
    result = {"dataset": "d", "model": "m", "pretrained": "p", "metrics": {"acc1": 0.5}}
    (here / "one.json").write_text(json.dumps(result))
    return request.param


def test_what_is_no_file_is_written_to_and_stays(words: list[str], here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for device in ("null", "full"):  # links, so that nothing worse than a link can be lost
        (here / f"{device}.png").symlink_to(f"/dev/{device}")
    os.mkfifo(here / "pipe.png")
    before = sorted(os.listdir(here))
    assert main([*words, "--output", "null.png"]) == 0
    for name, says in (("full.png", "No space left on device"), ("pipe.png", "no process reads this pipe")):
        assert main([*words, "--output", name]) == 2
        assert f"tokensieve: error: cannot write {name}: {says}." in capfd.readouterr().err
    assert sorted(os.listdir(here)) == before and (here / "null.png").is_symlink() and (here / "pipe.png").is_fifo()
    if words[0] in ("build", "report"):  # nothing else is on the standard output then
        assert main([*words, "--output", "/dev/stdout"]) == 0
        printed = capfd.readouterr().out
        assert printed.startswith("dataset,model," if words[0] == "build" else "<!DOCTYPE html>")
        assert "/dev/stdout" not in printed


def test_on_a_full_disk_the_old_file_stays(words: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "old.png").write_text("old")
    before = sorted(os.listdir(here))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
    try:
        assert main([*words, "--output", "old.png"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "tokensieve: error: cannot write old" in (said := capsys.readouterr().err) and "File too large" in said
    assert sorted(os.listdir(here)) == before and (here / "old.png").read_text() == "old"


@pytest.mark.parametrize("template", ["{plan:>99999999999}.png", "{plan!r}.png", "{plan.__class__}.png", "{0}.png", "a\nb.png"])
def test_templates_hold_plain_names_only(template: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (WRITERS[0], WRITERS[3]):
        assert main([*words, "--output", template]) == 2
        assert "is not a template" in (said := capsys.readouterr().err) or "its name has the character '\\n'" in said
    assert not os.listdir(here)
