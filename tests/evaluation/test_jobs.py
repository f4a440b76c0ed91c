"""Jobs of `tokensieve eval`: models, data sets, languages and plans, and the result file of each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.evaluation import NAME, Run, only
from tests.support.pictures import CLASSES
from tokensieve.models import loading


def test_several_models_data_sets_and_languages(run: Run, tiny_clip: SimpleNamespace, shards: Path, tmp_path: Path) -> None:
    for name in ("colours", "colours2"):
        shutil.copytree(shards, tmp_path / "data" / name)
    other = tmp_path / "other.safetensors"
    shutil.copy(tiny_clip.weights, other)
    flags = ["--dataset", "wds/colours", "wds/colours2", "--dataset_root", f"{tmp_path}/data/{{dataset}}"]
    done = run(*flags, "--pretrained", tiny_clip.weights, other, "--language", "en", "de")
    assert len(done.results) == 8
    assert "colours2_other.safetensors_tiny-clip_de_zeroshot_classification.json" in done.results


def test_lists_in_files(run: Run, tiny_clip: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "models.txt").write_text(f"{tiny_clip.name},{tiny_clip.weights}\n\n")
    (tmp_path / "sets.txt").write_text("wds/colours\n")
    done = run("--pretrained_model", "models.txt", "--dataset", "sets.txt")
    assert list(done.results) == [f"{NAME}.json"]


def test_pretrained_model_pairs_and_collections(run: Run, tiny_clip: SimpleNamespace) -> None:
    assert run("--pretrained_model", f"{tiny_clip.name},{tiny_clip.weights}").results
    assert loading.model_pairs(None, None, ["openai"])[0] == ("ViT-B-32", "openai")
    assert loading.model_pairs(["a", "b"], ["c", "d"], None) == [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]
    error = run("--pretrained_model", "openia", expect=2).err
    assert "MODEL,WEIGHTS" in error and "Did you mean 'openai'" in error


def test_split_and_test_split_are_one(run: Run, shards: Path, tmp_path: Path) -> None:
    shutil.copytree(shards, tmp_path / "d")
    (tmp_path / "d" / "test").rename(tmp_path / "d" / "held")
    for flag in ("--split", "--test_split"):
        assert only(run("--dataset_root", "d", flag, "held"))["run"]["split"] == "held"
    assert "nshards.txt" in run("--dataset_root", "d", expect=2).err


def test_output_templates(run: Run, tmp_path: Path) -> None:
    run("--output", "deep/{model}/{pretrained}-{language}-{task}-{dataset}.json")
    assert (tmp_path / "deep/tiny-clip/tiny.safetensors-en-zeroshot_classification-colours.json").exists()
    (tmp_path / "folder").mkdir()
    run("--output", "folder")
    assert (tmp_path / "folder" / f"{NAME}.json").exists()
    run("--output", "full/{pretrained_full_path}.json")
    assert len(list((tmp_path / "full").iterdir())) == 1
    assert "{plan}" in run("--output", "{nothing}.json", expect=2).err


def test_two_runs_cannot_share_a_file(run: Run, tiny_clip: SimpleNamespace) -> None:
    error = run("--language", "en", "de", "--output", "x.json", expect=2).err
    assert "x.json both for" in error


def test_skip_existing_skips_only_the_same_run(run: Run, shards: Path, tmp_path: Path) -> None:
    run("--plan", "random:6", "--skip_existing")
    before = (tmp_path / f"{NAME}.json").stat().st_mtime_ns
    done = run("--plan", "random:6", "--skip_existing")
    assert "skipped" in done.err and (tmp_path / f"{NAME}.json").stat().st_mtime_ns == before
    for flags in (["--plan", "random:7"], ["--limit", 9], ["--seed", 1], ["--amp"], ["--batch_size", 4]):
        changed = run(*flags, "--skip_existing")
        assert "skipped" not in changed.err, flags
    assert len(list(tmp_path.glob(f"{NAME}_????????.json"))) == 5  # and each is found under its own name
    done = run("--limit", 9, "--skip_existing")
    assert "skipped" in done.err and not done.results


def test_skip_existing_sees_changed_weights_and_data(
    run: Run, tiny_clip: SimpleNamespace, shards: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    weights, data = tmp_path / "w.safetensors", tmp_path / "data"
    shutil.copy(tiny_clip.weights, weights)
    shutil.copytree(shards, data)
    flags = ["--pretrained", weights, "--dataset_root", data, "--skip_existing"]
    run(*flags)
    assert "skipped" in run(*flags).err
    (data / "classnames.txt").write_text("\n".join(reversed(CLASSES)))
    assert "skipped" not in run(*flags).err
    state = load_file(weights)
    state["visual.proj"] += 1
    save_file(state, weights)
    assert "skipped" not in run(*flags).err


def test_part_of_a_run_can_be_skipped(run: Run) -> None:
    run("--plan", "random:6", "--output", "colours_{plan}.json")
    done = run("--plan", "random:6", "--compare", "none", "--output", "colours_{plan}.json", "--skip_existing")
    assert done.files == ["colours_none.json", "colours_random-6.json"]
    assert done.err.count("skipped") == 1


def test_every_run_gets_a_file_of_its_own(run: Run, tmp_path: Path) -> None:
    (tmp_path / "colours.json").write_text('"a file of mine"')
    times = []
    for end in ("", "-2", "-3"):
        done = run("--output", "colours.json", quiet=False)
        ((name, row),) = done.results.items()
        assert name == f"colours_{row['run']['key'][:8]}{end}.json"
        assert f"colours.json is taken; this result is in {name}" in done.err and f"result: {name}" in done.out
        times.append(row["run"]["time"])
    assert times == sorted(times) and all(time.endswith("+00:00") for time in times)
    assert (tmp_path / "colours.json").read_text() == '"a file of mine"'


def test_several_plans_are_written_to_one_device(run: Run, tmp_path: Path) -> None:
    assert not run("--plan", "random:6", "--compare", "none", "--output", "/dev/null").files
    with open(tmp_path / "both", "wb") as file:
        run("--plan", "random:6", "--compare", "none", "--output", f"/dev/fd/{file.fileno()}")
    decoder, text, plans = json.JSONDecoder(), (tmp_path / "both").read_text(), []
    while text:
        row, end = decoder.raw_decode(text)
        plans.append(row["reduction"]["plan"])
        text = text[end:].lstrip()
    assert plans == ["random:6", "none"]


def test_a_long_plan_has_a_short_name(run: Run) -> None:
    plan = " + ".join(["random:6"] * 60)
    done = run("--plan", plan, "--compare", f"{plan} + random:5", "--output", "colours_{plan}.json")
    assert len(done.results) == 2 and max(map(len, done.results)) == 240


def test_unwritable_output_is_found_before_anything_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(loading, "load", never)
    (tmp_path / "file").write_text("")
    assert "cannot write" in run("--output", "file/x.json", expect=2).err
    (tmp_path / "x.json").mkdir()
    assert "x.json" in run("--output", "x.json/../x.json/a/../../file/y.json", expect=2).err
